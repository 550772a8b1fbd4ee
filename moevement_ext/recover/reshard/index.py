# SPDX-License-Identifier: Apache-2.0
"""Index of the records of a slot over all its owners, and the ranges that a rank needs of them.

Pure: no file and no connection. A tensor has a name that is equal in every layout; the elements of
its (tensor-parallel) shard lie in ranges on one or more owners. Where layouts divide a tensor
differently, ranges refer to the whole tensor.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import Record, SlotHeader


class Division(NamedTuple):
    """How elements of a rank's shard lie in the whole tensor: in blocks, one after the other.

    A tensor [rows, columns] divided by rows has one block per shard, or one for each half of a
    gated unit; divided by columns, each row is a block.
    """

    block: int = 0
    """Elements of a block of the shard; 0: the shard is the whole tensor."""
    shards: int = 1
    shard: int = 0

    def ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of the whole tensor for elements `start` to `end` of the shard, in order."""
        if not self.block:
            yield start, end
            return
        at = start
        while at < end:
            number, within = divmod(at, self.block)
            count = min(self.block - within, end - at)
            first = (number * self.shards + self.shard) * self.block + within
            yield first, first + count
            at += count


NameOf = Callable[[str, str, int], str]
"""Name in every layout, of operator and tensor of an owner."""
DivisionOf = Callable[[Record, int], Division]
"""Place of an owner's record in the tensor of that name."""
_WHOLE = Division()


class Wanted(NamedTuple):
    """One range that a rank needs."""

    name: str
    part: str
    dtype: str
    start: int
    end: int
    nbytes: int
    volatile: bool = False
    """May differ between ranks, as it is also written between two updates."""


class Portion(NamedTuple):
    """Bytes of one record that go to one place."""

    owner: int
    record: int
    """Index in the header of the slot."""
    begin: int
    end: int
    """Bytes within the record."""
    at: int
    """Offset in the wanted range, in bytes."""


class _Held(NamedTuple):
    start: int
    end: int
    owner: int
    record: int
    begin: int
    """First byte within the record."""
    size: int
    """Bytes of an element."""
    checksum: int
    """Checksum of the record."""


class SlotIndex:
    """The records of one slot over all owners; complete before the first `pieces`."""

    def __init__(
        self, name_of: NameOf, division_of: DivisionOf = lambda record, owner: _WHOLE
    ) -> None:
        self._name_of = name_of
        self._division_of = division_of
        self._held: dict[tuple[str, str, str], list[_Held]] = {}
        self._sorted: dict[tuple[str, str, str], _Sorted] = {}

    def add(self, header: SlotHeader) -> None:
        for index, record in enumerate(header.records):
            held = self._held.setdefault(self._key(header.owner, record), [])
            size, rest = divmod(record.nbytes, max(record.end - record.start, 1))
            if rest:
                raise RefusedWindow(
                    f'{record.tensor} ({record.part}): {record.nbytes} bytes are no whole elements'
                )
            begin = 0
            division = self._division_of(record, header.owner)
            for start, end in division.ranges(record.start, record.end):
                held.append(_Held(start, end, header.owner, index, begin, size, record.checksum))
                begin += size * (end - start)

    def _key(self, owner: int, record: Record) -> tuple[str, str, str]:
        name = self._name_of(record.operator, record.tensor, owner)
        return name, record.part, record.dtype

    def pieces(self, need: Wanted, distance: Callable[[int], int]) -> Iterator[Portion]:
        """Pieces that make up a range, each element once, in ascending order.

        Of owners with the same elements, the one with the least `distance` is chosen.
        Raises `RefusedWindow` if elements are missing, or owners hold different bytes of
        the same range.
        """
        held = self._of(need)
        at = need.start
        while at < need.end:
            here = held.around(at)
            if not here:
                raise RefusedWindow(
                    f'no rank holds {need.name} ({need.part}, {need.dtype}) from element {at} on'
                )
            chosen = min(here, key=lambda item: (distance(item.owner), -item.end))
            end = min(chosen.end, need.end)
            yield _piece(chosen, at, end, need)
            at = end

    def _of(self, need: Wanted) -> '_Sorted':
        """Holders of a tensor; compared once, then cached."""
        key = need.name, need.part, need.dtype
        if key not in self._sorted:
            held = self._held.get(key, [])
            if not need.volatile:
                _require_equal(need, held)
            self._sorted[key] = _Sorted(held)
        return self._sorted[key]


class _Sorted:
    """Ranges in order; some overlap."""

    def __init__(self, held: list[_Held]) -> None:
        self._held = sorted(held, key=attrgetter('start'))
        self._longest = max((item.end - item.start for item in held), default=0)

    def around(self, at: int) -> list[_Held]:
        """Ranges that contain this element."""
        first = bisect_right(self._held, at - self._longest, key=attrgetter('start'))
        last = bisect_right(self._held, at, key=attrgetter('start'))
        return [item for item in self._held[first:last] if at < item.end]


def _piece(held: _Held, start: int, end: int, need: Wanted) -> Portion:
    size = held.size
    begin, stop = (held.begin + size * (element - held.start) for element in (start, end))
    return Portion(held.owner, held.record, begin, stop, size * (start - need.start))


def _require_equal(need: Wanted, held: Iterable[_Held]) -> None:
    """Check that owners of the same range have the same bytes.

    Ranges that only overlap (tied embeddings, sharded on two stages) have no common checksum.
    """
    first: dict[tuple[int, int], _Held] = {}
    for item in held:
        known = first.setdefault((item.start, item.end), item)
        if known.checksum != item.checksum:
            raise RefusedWindow(
                f'ranks {known.owner} and {item.owner} hold different bytes of {need.name} '
                f'({need.part}), so that another layout cannot take it'
            )
