# SPDX-License-Identifier: Apache-2.0
r"""Converts text to Megatron's indexed dataset: P.bin (tokens) and P.idx (index of documents).

    moevement prepare-data --output-prefix data/stdlib
    moevement prepare-data --input books/ notes.txt --output-prefix data/text --append-eod
    moevement prepare-data --input crawl.jsonl --output-prefix data/gpt2 \
        --tokenizer GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

A text file is one document, as is each line of a JSON lines file. By default tokens are the bytes
themselves (ids 0 to 255, end of document 256), which upstream's NullTokenizer serves without a
download. Memory holds one document. The last output line has the flags for the trainer.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

__package__ = __package__ or 'tools'  # scripts also run this file of a checkout by its path

from .lab.arguments import Parser, above_0
from .lab.benchmark import exit_on_sigterm
from .lab.errors import LabError

STDLIB, BYTES = 'stdlib', 'bytes'
MIB = 1 << 20
TEXT, JSON_LINES = {'.txt', '.md', '.rst', '.py'}, {'.jsonl', '.ndjson'}
_NOT_OF_STDLIB = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}


class Tokenizer(NamedTuple):
    """What makes tokens of text."""

    vocab_size: int
    eod: int
    trainer_flags: str
    """Flags that make the trainer use the same tokens."""
    encode: Callable[[bytes], np.ndarray]
    """Token ids, 1-D, of a text."""


# NullTokenizer takes the last id as end of document.
BYTE_TOKENIZER = Tokenizer(
    257, 256, '--tokenizer-type NullTokenizer --vocab-size 257',
    partial(np.frombuffer, dtype=np.uint8),
)  # fmt: skip


def upstream_tokenizer(name: str, flags: Sequence[str]) -> Tokenizer:
    """A text tokenizer of Megatron, built from Megatron's own flags; exits on an unknown flag.

    Raises LabError: it cannot be built.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = Parser(f'moevement prepare-data --tokenizer {name}', allow_abbrev=False)
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, 'tokenizer')
    args = parser.parse_args(flags)
    args.tokenizer_type = name
    args.pad_vocab_size = False  # the trainer pads the model's vocabulary
    try:
        built = build_tokenizer(args)
    except (AssertionError, ImportError, NameError, OSError, TypeError, ValueError) as error:
        # Upstream asserts its flags; without a tokenizer's package, a name is undefined.
        raise LabError(
            f'--tokenizer {name}: {error}. Needed: its files (--tokenizer-model or --vocab-file '
            'and --merge-file) and the package it comes from (transformers, sentencepiece or '
            'tiktoken)'
        ) from error

    def encode(text: bytes) -> np.ndarray:
        return np.asarray(built.tokenize(text.decode('utf-8')), dtype=np.int64)

    trainer_flags = shlex.join(['--tokenizer-type', name, *flags])
    return Tokenizer(built.vocab_size, built.eod, trainer_flags, encode)


def find_files(inputs: Sequence[str]) -> list[Path]:
    """All files to read: the inputs in the order given, each folder in sorted order.

    Files given by name may have any suffix, and may be pipes. Raises LabError if an input does not
    exist, or if no file is found.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if name == STDLIB:
            files += _files_in(Path(sysconfig.get_path('stdlib')), {'.py'}, _NOT_OF_STDLIB)
        elif path.is_dir():
            files += _files_in(path, TEXT | JSON_LINES)
        elif path.exists():
            files.append(path)
        else:
            raise LabError(f'--input {name}: no such file or folder')
    if not files:
        suffixes = ' '.join(sorted(TEXT | JSON_LINES))
        raise LabError(f'--input {" ".join(inputs)}: no text files; folders give {suffixes}')
    return files


def _files_in(root: Path, suffixes: Collection[str], skipped: Collection[str] = ()) -> list[Path]:
    """Files below `root`, sorted by path, without hidden and `skipped` folders."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if not n.startswith('.') and n not in skipped]
        paths = (Path(folder, name) for name in names)
        found += [path for path in paths if path.suffix.lower() in suffixes and path.is_file()]
    return sorted(found)


def documents(files: Sequence[Path], json_key: str) -> Iterator[tuple[str, bytes]]:
    """Place and text of each document; raises LabError for a line without one."""
    for path in files:
        # A .json file given by name contains JSON lines, as for upstream's preprocessing.
        if path.suffix.lower() not in JSON_LINES | {'.json'}:
            yield str(path), path.read_bytes()
            continue
        with path.open('rb') as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f'{path}:{number}'
                    yield where, _text_of(line, json_key, where)


def _text_of(line: bytes, key: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise LabError(f'{where}: not a JSON object on one line ({error})') from error
    known = isinstance(record, dict)
    if not known or not isinstance(record.get(key), str):
        keys = ', '.join(record) if known else type(record).__name__
        raise LabError(f'{where}: no text under {key!r} (found: {keys}); name it with --json-key')
    # A lone surrogate (valid JSON) has no UTF-8 form.
    return str(record[key]).encode('utf-8', errors='replace')


def write_dataset(files: Sequence[Path], args: argparse.Namespace, tokenizer: Tokenizer) -> str:
    """Write prefix.bin and prefix.idx, both whole or neither; returns what they hold.

    Raises LabError if the inputs have no text; an older dataset then stays unchanged.
    """
    # Imported here, as it takes seconds: --help and wrong flags should be fast.
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    ending = np.array([tokenizer.eod] if args.append_eod else [], np.int64)
    count = tokens = nbytes = 0
    beside = Path(args.output_prefix).parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.prepare_data-', dir=beside) as folder:
        new = Path(folder, 'new')
        builder = IndexedDatasetBuilder(f'{new}.bin', dtype=dtype)
        for where, text in documents(files, args.json_key):
            nbytes += len(text)
            if (ids := _token_ids(text, tokenizer, dtype, where)).size:
                ids = np.append(ids, ending).astype(dtype)
                builder.add_document(ids, [ids.size])
                count, tokens = count + 1, tokens + ids.size
            if nbytes >= args.limit_mb * MIB:
                break
        if not count:
            raise LabError('the inputs hold no text: every file or record is empty')
        builder.finalize(f'{new}.idx')
        _publish(new, args.output_prefix)
    return f'{count:,} documents, {tokens:,} tokens from {nbytes / MIB:,.1f} MiB of text'


def _token_ids(text: bytes, tokenizer: Tokenizer, dtype: type[np.number], where: str) -> np.ndarray:
    """Ids in the type of the dataset; raises LabError for one that would become another."""
    try:
        ids = tokenizer.encode(text)
    except UnicodeDecodeError as error:
        remedy = f'convert it or use --tokenizer {BYTES}'
        raise LabError(f'{where}: not UTF-8 ({error.reason}); {remedy}') from error
    typed: np.ndarray = ids.astype(dtype)
    for wrapped in ids[typed != ids][:1]:
        raise LabError(
            f'{where}: token {wrapped} does not fit {dtype.__name__}, the type of this '
            'vocabulary; correct --vocab-size or the tokenizer'
        )
    return typed


def _publish(new: Path, prefix: str) -> None:
    """Move a dataset to `prefix`. It exists once its index does: that goes first, comes last."""
    Path(f'{prefix}.idx').unlink(missing_ok=True)
    # Upstream keeps a dataset's shuffles here and does not detect changed data.
    for shuffles in Path(prefix, 'cache').glob('*_indices'):
        shutil.rmtree(shuffles)
    for suffix in ('.bin', '.idx'):
        os.replace(f'{new}{suffix}', f'{prefix}{suffix}')


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """This tool's arguments, and flags for the tokenizer."""
    parser = Parser('moevement prepare-data', description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add('--input', nargs='+', default=[STDLIB], metavar='PATH',
        help='text files, JSON lines files or folders of them; "stdlib" (default) stands for the '
        "sources of this Python's standard library")  # fmt: skip
    add('--output-prefix', required=True, metavar='P', help='writes P.bin and P.idx')
    add('--tokenizer', default=BYTES, metavar='TYPE',
        help=f'"{BYTES}" (default) or a --tokenizer-type of Megatron, followed by its own flags '
        '(--tokenizer-model, --vocab-file, --merge-file, ...)')  # fmt: skip
    ends = 'end each document with the end-of-document token'
    add('--append-eod', action='store_true', help=ends)
    add('--json-key', default='text', metavar='KEY', help='key of the text in a JSON line')
    add('--limit-mb', type=above_0, default=math.inf, metavar='N',
        help='stop once N MiB of text are read, after the piece that reaches it')  # fmt: skip
    args, tokenizer_flags = parser.parse_known_args(argv)
    if args.tokenizer == BYTES and tokenizer_flags:
        parser.error(f'--tokenizer {BYTES} takes no flags: {" ".join(tokenizer_flags)}')
    if not Path(args.output_prefix).name or args.output_prefix.endswith('/'):
        parser.error(f'--output-prefix {args.output_prefix}: add a file name, e.g. data/text')
    return args, tokenizer_flags


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()  # the unfinished dataset is removed
    args, flags = parse_arguments(argv)
    try:
        files = find_files(args.input)
        known = args.tokenizer == BYTES
        tokenizer = BYTE_TOKENIZER if known else upstream_tokenizer(args.tokenizer, flags)
        contents = write_dataset(files, args, tokenizer)
    except LabError as error:
        print(f'prepare_data: {error}', file=sys.stderr)
        return 1
    except OSError as error:
        print(f'prepare_data: {error.filename}: {error.strerror}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('prepare_data: interrupted, nothing written', file=sys.stderr)
        return 130
    prefix = args.output_prefix
    print(f'{prefix}.bin, {prefix}.idx: {contents}')
    print(f'flags for the trainer: --data-path {shlex.quote(prefix)} {tokenizer.trainer_flags}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
