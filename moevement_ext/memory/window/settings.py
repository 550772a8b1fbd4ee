# SPDX-License-Identifier: Apache-2.0
"""What a job was launched with, by name, so that a difference is told with both values.

The first slot of every window carries it. Digests of a run and of a layout say *that* two differ;
this says in what. It also has what no digest covers, since a rank may not know it (a file that its
node has not mounted) or since it may differ without another bit (a version, the environment).
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import xxhash

Table = dict[str, str]
"""Values as text, by names that a person knows: flags, files, packages, variables."""

MAX_BYTES = 16 * 1024
"""Bound of what is encoded; it has room beside the header of a slot (`sizing.SLOT_ROOM_BYTES`)."""

# Characters of a value; of a longer one the beginning, and a digest of all of it.
_SHOWN = 80
_MAX_LINES = 6
# Room for what says in a header how many bytes follow.
_LENGTH_BYTES = 8
_MAX_DECODED = 4 * 2**20
_ABSENT = 'absent'


class RunSettings(msgspec.Struct, frozen=True):
    """What a job was launched with. What decides bits for sure comes first."""

    flags: Table = {}
    """All that count: they decide bits."""
    layout: Table = {}
    """The parallel layout."""
    files: Table = {}
    """What files that flags name hold. A file that a rank does not see is unknown to it."""
    versions: Table = {}
    """Versions of what computes."""
    environment: Table = {}
    """Variables that may decide bits."""


class Differences(NamedTuple):
    """Between two launches, or two ranks; one line for each name, with both values."""

    decisive: list[str]
    """Bits differ: what the one has captured is of no use to the other."""
    doubtful: list[str]
    """Bits may differ."""

    def __bool__(self) -> bool:
        return bool(self.lines)

    @property
    def lines(self) -> list[str]:
        """All of them, what is decisive first."""
        return [*self.decisive, *self.doubtful]


def differences(
    one: RunSettings, other: RunSettings, words: tuple[str, str] = ('was', 'is')
) -> Differences:
    """What differs, as lines `name: was value, is value`.

    Args:
        one: of the earlier launch, or of another rank.
        other: of this one.
        words: what comes before the value of each in a line.
    """
    known = one.files.keys() & other.files.keys()
    files = [{name: item.files[name] for name in known} for item in (one, other)]
    decisive = [(one.flags, other.flags), (one.layout, other.layout), (files[0], files[1])]
    doubtful = [(one.versions, other.versions), (one.environment, other.environment)]
    return Differences(
        [line for pair in decisive for line in _lines(*pair, words)],
        [line for pair in doubtful for line in _lines(*pair, words)],
    )


def told(lines: Sequence[str]) -> str:
    """Some of the lines in one, and how many more there are."""
    more = len(lines) - _MAX_LINES
    return '; '.join(lines[:_MAX_LINES]) + (f'; and {more} more' if more > 0 else '')


def bounded(settings: RunSettings) -> RunSettings:
    """The same, short enough for `encode`; equal settings stay equal, others differ.

    Long values are cut, then all are digests; what has most names, as the files of a large blend,
    becomes one.
    """
    tables = msgspec.structs.asdict(settings)
    for shorten in (_shown, _hashed):
        tables = {part: _each(table, shorten) for part, table in tables.items()}
        if _fits(tables):
            return RunSettings(**tables)
    for part in sorted(tables, key=lambda part: len(tables[part]), reverse=True):
        tables[part] = {f'all {len(tables[part])} {part}': digest_of(tables[part])}
        if _fits(tables):
            break
    return RunSettings(**tables)


def encode(settings: RunSettings) -> bytes:
    """Less than `MAX_BYTES` of what `bounded` returned."""
    return zlib.compress(msgspec.msgpack.encode(settings, order='sorted'), 9)


@lru_cache(maxsize=64)
def decode(encoded: bytes) -> RunSettings:
    """Inverse of `encode`.

    Raises:
        ValueError: it is something else.
    """
    try:
        text = zlib.decompressobj().decompress(encoded, _MAX_DECODED)
        return msgspec.msgpack.decode(text, type=RunSettings)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f'settings cannot be decoded: {error}') from error


def digest_of(value: object) -> str:
    """Digest of settings, or of a part of them; the same in every process."""
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(value, order='sorted'))


def _fits(tables: Mapping[str, Table]) -> bool:
    return len(encode(RunSettings(**tables))) < MAX_BYTES - _LENGTH_BYTES


def _lines(one: Mapping[str, str], other: Mapping[str, str], words: tuple[str, str]) -> list[str]:
    names = sorted({*one, *other})
    pairs = ((name, one.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names)
    return [f'{name}: {words[0]} {a}, {words[1]} {b}' for name, a, b in pairs if a != b]


def _each(table: Mapping[str, str], shorten: Callable[[str], str]) -> Table:
    return {name: shorten(value) for name, value in table.items()}


def _shown(value: str) -> str:
    if len(value) <= _SHOWN:
        return value
    return f'{value[: _SHOWN - 20]}... ({xxhash.xxh3_64_hexdigest(value.encode())})'


def _hashed(value: str) -> str:
    return value if len(value) <= 9 else f'#{xxhash.xxh3_64_hexdigest(value.encode())[:8]}'
