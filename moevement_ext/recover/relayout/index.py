# SPDX-License-Identifier: Apache-2.0
"""What all owners of a slot hold together, and which ranges of it make up what a rank needs.

Pure: no file and no connection. A tensor has a name that is equal in every layout; the elements of
its (tensor-parallel) shard lie in ranges on several owners, some of them on more than one.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import Record, SlotHeader

NameOf = Callable[[str, str, int], str]
"""Name in every layout, of operator and tensor of an owner."""


class Wanted(NamedTuple):
    """One range that a rank needs."""

    name: str
    part: str
    dtype: str
    start: int
    end: int
    nbytes: int
    volatile: bool = False
    """It may differ from rank to rank, as it is written between two updates, too."""


class Portion(NamedTuple):
    """Bytes of one record that go to one place."""

    owner: int
    record: int
    """Index in the header of the slot."""
    begin: int
    end: int
    """Bytes within the record."""
    at: int
    """Byte within the range that is needed."""


class _Held(NamedTuple):
    start: int
    end: int
    owner: int
    record: int
    nbytes: int
    checksum: int


class SlotIndex:
    """The records of one slot over all owners.

    Args:
        name_of: names a tensor of an owner.
    """

    def __init__(self, name_of: NameOf) -> None:
        self._name_of = name_of
        self._held: dict[tuple[str, str, str], list[_Held]] = {}

    def add(self, header: SlotHeader) -> None:
        """Enter the records of one owner."""
        for index, record in enumerate(header.records):
            held = _Held(
                record.start, record.end, header.owner, index, record.nbytes, record.checksum
            )
            self._held.setdefault(self._key(header.owner, record), []).append(held)

    def _key(self, owner: int, record: Record) -> tuple[str, str, str]:
        name = self._name_of(record.operator, record.tensor, owner)
        return name, record.part, record.dtype

    def pieces(self, need: Wanted, distance: Callable[[int], int]) -> Iterator[Portion]:
        """Pieces that make up a range, each element once, in ascending order.

        Args:
            need: the range.
            distance: of an owner; the nearest of those with the same elements is taken.

        Raises:
            RefusedWindow: elements are missing, or owners hold different bytes of the same range.
        """
        held = self._held.get((need.name, need.part, need.dtype), [])
        if not need.volatile:
            _require_equal(need, held)
        at = need.start
        while at < need.end:
            here = [item for item in held if item.start <= at < item.end]
            if not here:
                raise RefusedWindow(
                    f'no rank holds {need.name} ({need.part}, {need.dtype}) from element {at} on'
                )
            chosen = min(here, key=lambda item: (distance(item.owner), -item.end))
            end = min(chosen.end, need.end)
            yield _piece(chosen, at, end, need)
            at = end


def _piece(held: _Held, start: int, end: int, need: Wanted) -> Portion:
    size, rest = divmod(held.nbytes, held.end - held.start)
    if rest:
        raise RefusedWindow(f'{need.name} ({need.part}): {held.nbytes} bytes are no whole elements')
    begin, stop = (size * (element - held.start) for element in (start, end))
    return Portion(held.owner, held.record, begin, stop, size * (start - need.start))


def _require_equal(need: Wanted, held: Iterable[_Held]) -> None:
    """Owners that hold the same range hold the same bytes."""
    first: dict[tuple[int, int], _Held] = {}
    for item in held:
        known = first.setdefault((item.start, item.end), item)
        if known.checksum != item.checksum:
            raise RefusedWindow(
                f'ranks {known.owner} and {item.owner} hold different bytes of {need.name} '
                f'({need.part}), so that another layout cannot take it'
            )
