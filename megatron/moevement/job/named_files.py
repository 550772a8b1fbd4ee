# SPDX-License-Identifier: Apache-2.0
"""The files that flags name: their content, and whether this rank's node has them.

An equal path does not imply equal content. Of data files, only sizes, counts and a few places are
read; other files are small, and read completely. Files that this rank cannot see are left out: a
node whose stages read no data may lack them.

A replacement worker may start on a node without the mounts or local copies of the lost node.
Upstream would fail somewhere in its set-up, with a message that does not name the cause, so the
files that a rank does read are checked.
"""

import importlib.util
import json
import os
import struct
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import megatron.core.datasets.blended_megatron_dataset_config as blends
import xxhash

from megatron.moevement.facts import Settings
from moevement_ext.config import ConfigurationError, node_name
from moevement_ext.memory.window.settings import Table

_TABLES = {
    name: tuple(flags.split())
    for name, flags in tomllib.loads(Path(__file__).with_suffix('.toml').read_text('utf-8')).items()
}
BLENDS, DATA, FILES = (_TABLES[name] for name in ('blends', 'data', 'files'))
"""Flags that name a file with data prefixes, data prefixes, and other files that affect bits."""
MODULES = _TABLES['modules']
WRITTEN, LARGE = (_TABLES[name] for name in ('written', 'large'))
"""Flags that name output paths, and large folders."""
_DATA_SUFFIXES = ('.idx', '.bin')

_HEAD_BYTES = 4096
# Number of places at which a data file is read, from its first bytes to its last: files with as
# many documents, or the same tokens in another order, may begin with equal bytes. With many files,
# fewer places are read, as the other ranks wait while a replacement reads.
_PLACES = 8
_ALL_PLACES = 128
# Of larger files (weights in a tokenizer's folder), only the size counts.
_LARGE_BYTES = 64 * 2**20
_INDEX = struct.Struct('<9sQBQQ')  # magic, version, type, sequences, documents
_INDEX_MAGIC = b'MMIDIDX\0\0'


def held_by_files(settings: Settings) -> Table:
    """Content of the files that flags name, by `<flag> <path>`, or by path for data."""
    found = Table()
    for name in BLENDS:
        path = settings.get(name)
        if isinstance(path, str | os.PathLike):
            with suppress(OSError, ValueError):
                blend = _parsed(name, Path(path).read_text())
                found[f'{_flag(name)} {path}'] = (
                    ' '.join(blend)
                    if isinstance(blend, list)
                    else json.dumps(blend, sort_keys=True)
                )
                found |= _data(_strings(blend))
    found |= _data(_strings([settings.get(name) for name in DATA]))
    for name in FILES:
        for path in _strings(settings.get(name)):
            with suppress(OSError, ValueError):  # not a path, or not on this node
                found[f'{_flag(name)} {path}'] = _held(Path(path))
    return found


def sequences_of(prefix: str) -> int:
    """Number of sequences in a dataset, which upstream splits; 0 if its index cannot be read."""
    with suppress(OSError, struct.error), open(f'{prefix}.idx', 'rb') as file:
        return int(_INDEX.unpack(file.read(_INDEX.size))[3])
    return 0


def code(settings: Settings) -> Table:
    """Digests of the files of modules that flags name, by flag."""
    found = Table()
    for name in MODULES:
        for module in _strings(settings.get(name)):
            for candidate in (module, module.rpartition('.')[0], module.rpartition(':')[0]):
                path = _source(candidate)
                if path is not None:
                    found[f'{_flag(name)} {candidate}'] = _held(path)
                    break
    return found


def other_files(settings: Settings, counts: Callable[[str], bool]) -> Table:
    """Content of files that unknown settings name: flags of a custom program, read or written."""
    known = {*BLENDS, *DATA, *FILES, *MODULES, *WRITTEN, *LARGE}
    found = Table()
    for name, value in settings.items():
        if name in known or not counts(name) or not isinstance(value, str | os.PathLike):
            continue
        with suppress(OSError, ValueError):
            path = Path(value)
            if path.is_file():
                found[f'{_flag(name)} {path}'] = _held(path)
    return found


def _flag(name: str) -> str:
    return '--tokenizer-metadata' if name == 'metadata_path' else f'--{name.replace("_", "-")}'


def _strings(value: object) -> Iterator[str]:
    """All strings in a nested value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _parsed(name: str, text: str) -> object:
    """Parse weights and prefixes, by split if the flag has splits, as upstream does."""
    if name == 'data_args_path':
        return text.split()
    splits = json.loads(text)
    return {
        split: given.split() if isinstance(given, str) else given for split, given in splits.items()
    }


def _data(prefixes: Iterable[str]) -> Table:
    named = [prefix + suffix for prefix in dict.fromkeys(prefixes) for suffix in _DATA_SUFFIXES]
    places = min(_PLACES, 1 + _ALL_PLACES // max(len(named), 1))
    found = Table()
    for name in named:
        with suppress(OSError, ValueError):
            found[name] = _samples_of(Path(name), places)
    return found


def _samples_of(path: Path, places: int) -> str:
    """Size and counts of a data file, and a digest of some of its bytes."""
    with open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        last = max(size - _HEAD_BYTES, 0)
        offsets = sorted({last * place // max(places - 1, 1) for place in range(places)})
        samples = [os.pread(file.fileno(), _HEAD_BYTES, offset) for offset in offsets]
    head, counts = samples[0], ''
    if len(head) >= _INDEX.size and head.startswith(_INDEX_MAGIC):
        *_, sequences, documents = _INDEX.unpack_from(head)
        counts = f', {sequences} sequences, {documents} documents'
    return f'{size} bytes{counts}, {_digest(b"".join(samples))}'


def _held(path: Path) -> str:
    if path.is_dir():
        names = sorted(found for found in path.iterdir() if found.is_file())
        held = [f'{found.name} {_held(found)}' for found in names]
        return f'{len(held)} files, {_digest(repr(held).encode())}'
    size = path.stat().st_size
    if size > _LARGE_BYTES:
        return f'{size} bytes'
    return f'{size} bytes, {_digest(path.read_bytes())}'


def _digest(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # a parent package cannot be imported; upstream reports the error
        return None
    has_file = spec is not None and spec.origin is not None and spec.has_location
    return Path(str(spec.origin)) if spec is not None and has_file else None


def refuse_missing(settings: Settings, rank: int) -> None:
    """Check, before anything else, that this node has the files that every rank reads.

    A relative path may be a name on a model hub, and is left to upstream.

    Raises:
        ConfigurationError: a file is missing; the message names flag, path, rank and node.
    """
    for name in _TABLES['read_by_all']:
        path = settings.get(name)
        if isinstance(path, str) and os.path.isabs(path) and not os.path.exists(path):
            raise _missing(rank, name, path)


def missing_data(settings: Settings, rank: int) -> ConfigurationError | None:
    """The error for the first dataset file that this node lacks; None if all exist."""
    for name in _TABLES['checked_data']:
        for prefix in _prefixes(settings.get(name)):
            for path in (prefix + part for part in _DATA_SUFFIXES):
                if not os.path.exists(path):
                    return _missing(rank, name, path)
    return None


def empty_part(settings: Settings) -> ConfigurationError | None:
    """The error for a part of --split without documents, of which upstream's builder never ends."""
    split = settings.get('split')
    if not isinstance(split, str) or settings.get('sft'):  # SFT data has another format
        return None
    parts = blends.convert_split_vector_to_split_matrix(blends.parse_and_normalize_split(split))
    for prefix in _prefixes(settings.get('data_path')):
        count = sequences_of(prefix)
        if count and any(round(a * count) == round(b * count) for a, b in filter(None, parts)):
            return ConfigurationError(
                f'--split {split}: a part of it gets none of the {count} sequences of {prefix}; '
                'give that part 0 or a larger share, or add documents.'
            )
    return None


def _prefixes(blend: object) -> Iterator[str]:
    """Dataset prefixes in a blend, with or without weights, except those in an object store."""
    for entry in blend if isinstance(blend, (list, tuple)) else ():
        text = str(entry)
        if not _is_number(text) and '://' not in text:
            yield text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _missing(rank: int, name: str, path: str) -> ConfigurationError:
    return ConfigurationError(
        f'{_flag(name)}: {path} does not exist for rank {rank} on {node_name()}; '
        'correct the path, or mount or copy the file to that node.'
    )
