# SPDX-License-Identifier: Apache-2.0
r"""Converts text to Megatron's indexed dataset: P.bin (tokens) and P.idx (index of documents).

    moevement prepare-data --output-prefix data/stdlib
    moevement prepare-data --input books/ notes.txt --output-prefix data/text --append-eod
    moevement prepare-data --input crawl.jsonl --output-prefix data/crawl

A text file is one document, as is each line of a JSON lines file. Tokens are the bytes themselves
(ids 0 to 255, end of document 256), which upstream's NullTokenizer serves without a download; for
other tokenizers use tools/preprocess_data.py of Megatron-LM. Memory holds one document. The last
output line has the flags for the trainer.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

__package__ = __package__ or 'tools'  # scripts also run this file of a checkout by its path

from moevement_ext.errors import EXIT_USER_ERROR

from .lab.programs import LabError, exit_on_sigterm, program

STDLIB = 'stdlib'
MIB = 1 << 20
TEXT, JSON_LINES = {'.txt', '.md', '.rst', '.py'}, {'.jsonl', '.ndjson'}
_NOT_OF_STDLIB = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}


# NullTokenizer takes the last id as end of document.
VOCABULARY, END_OF_DOCUMENT = 257, 256


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


def documents(files: Sequence[Path], json_key: str) -> Iterator[bytes]:
    """Text of each document; raises LabError for a line without one."""
    for path in files:
        # A .json file given by name contains JSON lines, as for upstream's preprocessing.
        if path.suffix.lower() not in JSON_LINES | {'.json'}:
            yield path.read_bytes()
            continue
        with path.open('rb') as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(line, json_key, f'{path}:{number}')


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


def write_dataset(files: Sequence[Path], args: argparse.Namespace) -> str:
    """Write prefix.bin and prefix.idx, both whole or neither; returns what they hold.

    Raises LabError if the inputs have no text; an older dataset then stays unchanged.
    """
    # Imported here, as it takes seconds: --help and wrong flags should be fast.
    with warnings.catch_warnings(action='ignore'):  # about packages that only training needs
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(VOCABULARY)
    ending = np.array([END_OF_DOCUMENT] if args.append_eod else [], dtype)
    count = tokens = nbytes = 0
    beside = Path(args.output_prefix).parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.prepare_data-', dir=beside) as folder:
        new = Path(folder, 'new')
        builder = IndexedDatasetBuilder(f'{new}.bin', dtype=dtype)
        for text in documents(files, args.json_key):
            nbytes += len(text)
            if text:
                ids = np.append(np.frombuffer(text, np.uint8).astype(dtype), ending)
                builder.add_document(ids, [ids.size])
                count, tokens = count + 1, tokens + ids.size
            if nbytes >= args.limit_mb * MIB:
                break
        if not count:
            raise LabError('the inputs hold no text: every file or record is empty')
        builder.finalize(f'{new}.idx')
        _publish(new, args.output_prefix)
    return f'{count:,} documents, {tokens:,} tokens from {nbytes / MIB:,.1f} MiB of text'


def _publish(new: Path, prefix: str) -> None:
    """Move a dataset to `prefix`. It exists once its index does: that goes first, comes last."""
    Path(f'{prefix}.idx').unlink(missing_ok=True)
    # Upstream keeps a dataset's shuffles here and does not detect changed data.
    for shuffles in Path(prefix, 'cache').glob('*_indices'):
        shutil.rmtree(shuffles)
    for suffix in ('.bin', '.idx'):
        os.replace(f'{new}{suffix}', f'{prefix}{suffix}')


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program('prepare-data', __doc__, allow_abbrev=False)
    args = parser.parse_args(argv)
    if not Path(args.output_prefix).name or args.output_prefix.endswith('/'):
        parser.error(f'--output-prefix {args.output_prefix}: add a file name, e.g. data/text')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()  # the unfinished dataset is removed
    args = parse_arguments(argv)
    try:
        contents = write_dataset(find_files(args.input), args)
    except (LabError, OSError) as error:
        why = f'{error.filename}: {error.strerror}' if isinstance(error, OSError) else error
        print(f'prepare-data: {why}', file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print('prepare-data: interrupted, nothing written', file=sys.stderr)
        return 130
    prefix = args.output_prefix
    print(f'{prefix}.bin, {prefix}.idx: {contents}')
    tokens = f'--tokenizer-type NullTokenizer --vocab-size {VOCABULARY}'
    print(f'flags for the trainer: --data-path {shlex.quote(prefix)} {tokens}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
