# SPDX-License-Identifier: Apache-2.0
"""Settings of a job by name, and its parallel layout in numbers, as windows carry them.

The first slot of every window carries the settings, so that messages about a difference can show
both values. Digests of run and layout show *that* two jobs differ; settings show which values
differ. They include values that no digest covers: a rank may be unable to read them (a file that
its node has not mounted), or a difference need not change a bit (a version, the environment).

A job in another layout can load a window with the layout and the owner's place in it: operators
have the same names on all ranks of all jobs, ranges of tensors refer to the whole (tensor-parallel)
shard, and the place tells which tensor-parallel shard it is.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from moevement_ext.errors import some

Table = dict[str, str]
"""Values as text, by names known to users: flags, files, packages, variables."""

MAX_BYTES = 16 * 1024
"""Largest encoded size; fits beside the header of a slot (`budget.SLOT_ROOM_BYTES`)."""

# Characters of a value; a longer value is cut and gets a digest of the whole.
_SHOWN = 80
_MAX_LINES = 6
# Room for the length field in a header.
_LENGTH_BYTES = 8
_MAX_DECODED = 4 * 2**20
_ABSENT = 'absent'

Size = Annotated[int, msgspec.Meta(ge=1)]
Index = Annotated[int, msgspec.Meta(ge=0)]


class RunSettings(msgspec.Struct, frozen=True):
    """Settings of a job; the tables that surely decide bits come first."""

    flags: Table = {}
    """The flags that decide bits, in any layout."""
    layout: Table = {}
    """The parallel layout, and flags that may change with it."""
    files: Table = {}
    """Content of files that flags name; unknown for a file that a rank does not see."""
    versions: Table = {}
    environment: Table = {}
    """Environment variables that may decide bits."""
    protection: Table = {}
    """Flags that all ranks of a job must share. They decide no bits, and may differ in another
    launch."""


_SETTINGS = msgspec.msgpack.Decoder(RunSettings)


class Differences(NamedTuple):
    """Differences between two launches, or two ranks: one line per name, with both values."""

    decisive: list[str]
    """Differences that change bits: neither side can use the other's windows."""
    doubtful: list[str]
    """Differences that may change bits."""

    def __bool__(self) -> bool:
        return bool(self.decisive or self.doubtful)


def differences(
    one: RunSettings,
    other: RunSettings,
    words: tuple[str, str] = ('was', 'is'),
    of_one_job: bool = False,
) -> Differences:
    """Compare two settings; returns lines `name: was value, is value`.

    `words` are the words before the value of `one` and of `other`. In one job a difference in
    `protection` is decisive, too.
    """
    known = one.files.keys() & other.files.keys()
    files = [{name: item.files[name] for name in known} for item in (one, other)]
    flags = [{**item.flags, **item.layout} for item in (one, other)]  # a release may move some
    decisive = [(flags[0], flags[1]), (files[0], files[1])]
    decisive += [(one.protection, other.protection)] if of_one_job else []
    doubtful = [(one.versions, other.versions), (one.environment, other.environment)]
    return Differences(
        [line for pair in decisive for line in _lines(*pair, words)],
        [line for pair in doubtful for line in _lines(*pair, words)],
    )


def first_lines(lines: Sequence[str]) -> str:
    """Join the first lines, with the number of those left out."""
    return some(lines, _MAX_LINES, '; ')


def bounded(settings: RunSettings) -> RunSettings:
    """Shorten settings for `encode`; equal settings stay equal, different ones stay different.

    First long values are cut, then all values become digests, then the table with the most
    names, such as the files of a large blend, becomes one digest.
    """
    every = msgspec.structs.asdict(settings)
    tables: dict[str, Table] = {
        part: {_readable(name): _readable(value) for name, value in table.items()}
        for part, table in every.items()
    }
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
    """Encode settings from `bounded` in fewer than `MAX_BYTES` bytes."""
    return zlib.compress(msgspec.msgpack.encode(settings, order='sorted'), 9)


@lru_cache(maxsize=64)
def decode(encoded: bytes) -> RunSettings:
    """Inverse of `encode`. Raises `ValueError` for other bytes."""
    try:
        text = zlib.decompressobj().decompress(encoded, _MAX_DECODED)
        return _SETTINGS.decode(text)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f'settings cannot be decoded: {error}') from error


def digest_of(value: object) -> str:
    """Digest of settings or of a part; the same in every process."""
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(value, order='sorted'))


def _fits(tables: Mapping[str, Table]) -> bool:
    return len(encode(RunSettings(**tables))) < MAX_BYTES - _LENGTH_BYTES


def _lines(one: Mapping[str, str], other: Mapping[str, str], words: tuple[str, str]) -> list[str]:
    names = sorted({*one, *other})
    pairs = ((name, one.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names)
    return [f'{name}: {words[0]} {a}, {words[1]} {b}' for name, a, b in pairs if a != b]


def _each(table: Mapping[str, str], shorten: Callable[[str], str]) -> Table:
    return {name: shorten(value) for name, value in table.items()}


def _readable(text: str) -> str:
    """Replace bytes of a path that are not UTF-8 by escapes."""
    return text.encode(errors='backslashreplace').decode()


def _shown(value: str) -> str:
    if len(value) <= _SHOWN:
        return value
    return f'{value[: _SHOWN - 20]}... ({xxhash.xxh3_64_hexdigest(value.encode())})'


def _hashed(value: str) -> str:
    return value if len(value) <= 9 else f'#{xxhash.xxh3_64_hexdigest(value.encode())[:8]}'


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of the parallel groups of a job."""

    ranks: Size
    tensor: Size = 1
    context: Size = 1
    pipeline: Size = 1
    chunks: Size = 1
    """Model chunks of a rank: more than 1 with interleaved stages."""
    data: Size = 1
    """Data-parallel ranks, without context parallelism."""
    expert: Size = 1
    expert_tensor: Size = 1
    instances: Size = 1
    """Instances of the sharded optimizer."""
    sharded: bool = False
    """The optimizer state is sharded over the data-parallel ranks."""
    stages: str = ''
    """How layers are divided among stages, if not evenly."""

    def __str__(self) -> str:
        sizes = {
            'TP': self.tensor,
            'CP': self.context,
            'PP': self.pipeline,
            'VPP': self.chunks,
            'DP': self.data,
            'EP': self.expert,
            'ETP': self.expert_tensor,
            'optimizer instances': self.instances,
        }
        parts = [f'{name} {size}' for name, size in sizes.items() if size > 1]
        parts += ['sharded optimizer'] if self.sharded else []
        parts += [self.stages] if self.stages else []
        count = f'{self.ranks} rank{"s" if self.ranks > 1 else ""}'
        return count + (f' ({", ".join(parts)})' if parts else '')


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """Place of one rank: its index in each of its parallel groups."""

    tensor: Index = 0
    context: Index = 0
    pipeline: Index = 0
    data: Index = 0
    expert: Index = 0
    expert_tensor: Index = 0
    expert_data: Index = 0


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Stamp of a slot for readers in another layout."""

    training: str
    """Digest of all settings that must not change, whatever the layout."""
    layout: Layout
    seat: Seat


def of_same_training(one: Placed | None, other: Placed | None) -> bool:
    """True if both are stamped, with the same training."""
    return one is not None and other is not None and one.training == other.training
