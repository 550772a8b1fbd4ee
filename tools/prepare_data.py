# SPDX-License-Identifier: Apache-2.0
r"""Converts text to Megatron's indexed dataset: P.bin (tokens) and P.idx (index of documents).

    moevement prepare-data --output-prefix data/stdlib
    moevement prepare-data --input books/ notes.txt --output-prefix data/text --append-eod
    moevement prepare-data --input crawl.jsonl --output-prefix data/gpt2 \
        --tokenizer GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

A text file is one document, as is each line of a JSON lines file. By default tokens are the bytes
themselves (ids 0 to 255, end of document 256), which upstream's NullTokenizer serves without a
download. The last output line has the flags for the trainer.

A text file above 1 MiB is divided at line ends into several sequences of one document; memory holds
one of them.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

__package__ = __package__ or 'tools'  # scripts also run this file of a checkout by its path

from .lab.arguments import Parser
from .lab.benchmark import exit_on_sigterm
from .lab.errors import LabError

STDLIB = 'stdlib'
BYTES = 'bytes'
MIB = 1 << 20
PIECE_BYTES = MIB
TEXT_SUFFIXES = frozenset({'.txt', '.md', '.rst', '.py'})
JSON_LINES_SUFFIXES = frozenset({'.jsonl', '.ndjson'})
STDLIB_SKIPPED = frozenset({'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'})
NOT_OF_TEXT = frozenset({'MultimodalTokenizer', 'NullMultimodalTokenizer', 'SFTTokenizer'})


# ---- tokenizers


class ByteTokenizer:
    """Every byte is its own token."""

    vocab_size = 257
    eod = 256  # NullTokenizer takes the last id as end of document
    trainer_flags = f'--tokenizer-type NullTokenizer --vocab-size {vocab_size}'
    """Flags that make the trainer use the same tokens."""

    def encode(self, text: bytes, name: str) -> np.ndarray:
        """Token ids, 1-D, of a piece of the file `name`."""
        return np.frombuffer(text, dtype=np.uint8)


class UpstreamTokenizer:
    """A text tokenizer of Megatron, selected by Megatron's own flags."""

    def __init__(self, tokenizer_type: str, flags: Sequence[str]) -> None:
        """Raises LabError if the tokenizer cannot be built; exits on an unknown flag."""
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
        from megatron.training.argument_utils import ArgumentGroupFactory
        from megatron.training.config import TokenizerConfig

        if tokenizer_type in NOT_OF_TEXT:
            raise LabError(f'--tokenizer {tokenizer_type}: not a tokenizer of plain text')
        parser = Parser(f'moevement prepare-data --tokenizer {tokenizer_type}', allow_abbrev=False)
        ArgumentGroupFactory(TokenizerConfig).build_group(parser, 'tokenizer')
        args = parser.parse_args(flags)
        args.tokenizer_type = tokenizer_type
        args.pad_vocab_size = False  # the trainer pads the model's vocabulary
        try:
            self._tokenizer = build_tokenizer(args)
        except (AssertionError, ImportError, NameError, OSError, TypeError, ValueError) as error:
            # Upstream asserts its flags; without a tokenizer's package, a name is undefined.
            raise LabError(
                f'--tokenizer {tokenizer_type}: {error}. Needed: its files (--tokenizer-model or '
                '--vocab-file and --merge-file) and the package it comes from '
                '(transformers, sentencepiece or tiktoken)'
            ) from error
        self.vocab_size: int = self._tokenizer.vocab_size
        self.eod: int = self._tokenizer.eod
        self.trainer_flags = shlex.join(['--tokenizer-type', tokenizer_type, *flags])

    def encode(self, text: bytes, name: str) -> np.ndarray:
        """Ids of UTF-8 text; raises LabError for other encodings."""
        try:
            return np.asarray(self._tokenizer.tokenize(text.decode('utf-8')), dtype=np.int64)
        except UnicodeDecodeError as error:
            raise LabError(
                f'{name}: not UTF-8 ({error.reason}); convert it or use --tokenizer {BYTES}'
            ) from error


type Tokenizer = ByteTokenizer | UpstreamTokenizer


# ---- inputs


def find_files(inputs: Sequence[str]) -> list[Path]:
    """All files to read: the inputs in the order given, each folder in sorted order.

    Files given by name may have any suffix, and may be pipes. Raises LabError if an input does not
    exist or is no text, or if no file is found.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if name == STDLIB:
            files += walk(Path(sysconfig.get_path('stdlib')), {'.py'}, STDLIB_SKIPPED)
        elif path.is_dir():
            files += walk(path, TEXT_SUFFIXES | JSON_LINES_SUFFIXES, frozenset())
        elif path.is_file() and is_binary(path):
            raise LabError(f'--input {name}: binary, it has NUL bytes; convert it to UTF-8 text')
        elif path.exists():
            files.append(path)
        else:
            raise LabError(f'--input {name}: no such file or folder')
    if not files:
        suffixes = ' '.join(sorted(TEXT_SUFFIXES | JSON_LINES_SUFFIXES))
        raise LabError(f'--input {" ".join(inputs)}: no text files; folders give {suffixes}')
    return files


def walk(root: Path, suffixes: set[str] | frozenset[str], skipped: frozenset[str]) -> list[Path]:
    """Text files below `root`, sorted by path, without hidden and `skipped` folders."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if not n.startswith('.') and n not in skipped]
        paths = [Path(folder, n) for n in names if Path(n).suffix.lower() in suffixes]
        found += [path for path in paths if path.is_file() and not is_binary(path)]
    return sorted(found)


def is_binary(path: Path) -> bool:
    """True if the start of the file has a NUL byte, which no text has."""
    with open(path, 'rb') as file:
        return b'\0' in file.read(8192)


def read_documents(path: Path, json_key: str) -> Iterator[Iterator[bytes]]:
    """Documents of a file, each as an iterator over its pieces; consume them in order."""
    with open(path, 'rb') as file:
        # A .json file given by name contains JSON lines, as for upstream's preprocessing.
        if path.suffix.lower() in JSON_LINES_SUFFIXES | {'.json'}:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield iter([json_text(line, json_key, f'{path}:{number}')])
        else:
            # Whole lines, so that no piece cuts a character.
            yield (b''.join(lines) for lines in iter(lambda: file.readlines(PIECE_BYTES), []))


def json_text(line: bytes, key: str, where: str) -> bytes:
    """Text of one JSON line; raises LabError naming `where` (file:line) if it has none."""
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


# ---- output


class Writer:
    """Builds a dataset in a separate folder; `publish` moves it into place."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, append_eod: bool) -> None:
        # Imported here, as it takes seconds: --help and wrong flags should be fast.
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        self._folder = folder
        self._tokenizer = tokenizer
        self._append_eod = append_eod
        self._dtype = DType.optimal_dtype(tokenizer.vocab_size)
        self._builder = IndexedDatasetBuilder(str(folder / 'new.bin'), dtype=self._dtype)
        self.bytes_read = self.documents = self.tokens = 0

    def add(self, name: str, pieces: Iterator[bytes]) -> None:
        """Adds one document, a sequence for each piece; one without tokens is left out."""
        ready: np.ndarray | None = None  # delayed: only the last piece gets the end of document
        for piece in pieces:
            self.bytes_read += len(piece)
            ids = self._typed(self._tokenizer.encode(piece, name), name)
            if not ids.size:
                continue
            if ready is not None:
                self._builder.add_item(torch.from_numpy(ready))
            ready = ids
            self.tokens += ids.size
        if ready is None:
            return
        if self._append_eod:
            ready = self._typed(np.append(ready, self._tokenizer.eod), name)
            self.tokens += 1
        self._builder.add_item(torch.from_numpy(ready))
        self._builder.end_document()
        self.documents += 1

    def _typed(self, ids: np.ndarray, name: str) -> np.ndarray:
        """Ids in the type of the dataset; raises LabError for one that would become another."""
        typed: np.ndarray = ids.astype(self._dtype)
        for wrapped in ids[typed != ids][:1]:
            raise LabError(
                f'{name}: token {wrapped} does not fit {self._dtype.__name__}, the type for '
                f'{self._tokenizer.vocab_size} tokens; correct --vocab-size or the tokenizer'
            )
        return typed

    def publish(self, prefix: Path) -> None:
        """Moves the finished dataset to prefix.bin and prefix.idx, replacing an older one.

        A dataset exists once its index does: the old index is removed first and the new one moved
        last, so that no interruption or loss of power leaves an index with the wrong tokens.
        """
        self._builder.finalize(str(self._folder / 'new.idx'))
        for name in ('new.bin', 'new.idx'):
            _sync(self._folder / name)
        index = Path(f'{prefix}.idx')
        index.unlink(missing_ok=True)
        _sync(index.parent)
        # Upstream keeps a dataset's shuffles here and does not detect changed data.
        for shuffles in Path(prefix, 'cache').glob('*_indices'):
            shutil.rmtree(shuffles)
        os.replace(self._folder / 'new.bin', f'{prefix}.bin')
        _sync(index.parent)
        os.replace(self._folder / 'new.idx', index)
        _sync(index.parent)


def _sync(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a loss of power."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():  # not every file system syncs folders
            raise
    finally:
        os.close(fd)


def write_dataset(files: Sequence[Path], args: argparse.Namespace, tokenizer: Tokenizer) -> Writer:
    """Writes prefix.bin and prefix.idx, both whole or neither; returns the writer's counts.

    Raises LabError if the inputs have no text or the output cannot be written; an older dataset
    then stays unchanged.
    """
    prefix = Path(args.output_prefix)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        workplace = tempfile.TemporaryDirectory(prefix='.prepare_data-', dir=prefix.parent)
    except OSError as error:
        reason = 'not a folder' if isinstance(error, FileExistsError) else error.strerror
        raise LabError(
            f'--output-prefix {prefix}: cannot write in {prefix.parent} ({reason}); '
            'choose another folder'
        ) from error
    limit = math.inf if args.limit_mb is None else int(args.limit_mb * MIB)
    total = min(limit, sum(path.stat().st_size for path in files))
    bar = tqdm(total=total, unit='B', unit_scale=True, desc='tokenizing', disable=None)
    with workplace as folder, bar as progress:
        writer = Writer(Path(folder), tokenizer, args.append_eod)

        def counted(pieces: Iterator[bytes]) -> Iterator[bytes]:
            """Ends after the piece that reaches the limit."""
            while writer.bytes_read < limit and (piece := next(pieces, None)) is not None:
                progress.update(len(piece))
                yield piece

        documents = ((path, pieces) for path in files
                     for pieces in read_documents(path, args.json_key))  # fmt: skip
        for path, pieces in documents:
            writer.add(str(path), counted(pieces))
            if writer.bytes_read >= limit:
                break
        if not writer.documents:
            raise LabError('the inputs hold no text: every file or record is empty')
        writer.publish(prefix)
    return writer


# ---- command line


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
    add(
        '--limit-mb',
        type=float,
        metavar='N',
        help='stop once N MiB of text are read (the piece of up to 1 MiB that reaches it is kept)',
    )
    args, tokenizer_flags = parser.parse_known_args(argv)
    if args.tokenizer == BYTES and tokenizer_flags:
        parser.error(f'--tokenizer {BYTES} takes no flags: {" ".join(tokenizer_flags)}')
    if args.limit_mb is not None and not 0 < args.limit_mb < math.inf:
        parser.error(f'--limit-mb {args.limit_mb}: give a finite number above 0')
    if not Path(args.output_prefix).name or args.output_prefix.endswith('/'):
        parser.error(f'--output-prefix {args.output_prefix}: add a file name, e.g. data/text')
    return args, tokenizer_flags


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()  # the unfinished dataset is removed
    args, flags = parse_arguments(argv)
    try:
        files = find_files(args.input)
        known = args.tokenizer == BYTES
        tokenizer = ByteTokenizer() if known else UpstreamTokenizer(args.tokenizer, flags)
        writer = write_dataset(files, args, tokenizer)
    except LabError as error:
        print(f'prepare_data: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('prepare_data: interrupted, nothing written', file=sys.stderr)
        return 130
    prefix = Path(args.output_prefix)
    print(
        f'{prefix}.bin, {prefix}.idx: {writer.documents:,} documents, {writer.tokens:,} tokens '
        f'from {writer.bytes_read / MIB:,.1f} MiB of text'
    )
    data = f'--data-path {shlex.quote(str(prefix))}'
    print(f'flags for the trainer: {data} {tokenizer.trainer_flags}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
