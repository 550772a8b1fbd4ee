# SPDX-License-Identifier: Apache-2.0
"""Byte ranges that a payload shares with an earlier window, so that they need not be sent."""

from collections.abc import Iterable

import msgspec

from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.window.name import Count, WindowName

Range = tuple[Count, Count, Count]
"""First byte in the payload, first byte in the earlier one, and number of bytes."""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """Ranges of the payload of a window of one slot."""

    window: WindowName
    """The earlier window of the same owner that contains the ranges."""
    ranges: list[Range]
    """In the order of the payload; they do not overlap."""

    def rest(self, nbytes: int, earlier: int | None = None) -> list[tuple[int, int]]:
        """Begin and end of the gaps between the ranges, in a payload of `nbytes`.

        Raises `ValueError` if the ranges are not in order, or not within this payload and
        the earlier one of `earlier` bytes (None: not checked).
        """
        found, end = [], 0
        for begin, there, count in self.ranges:
            if begin < end or begin + count > nbytes or there + count > (earlier or there + count):
                raise ValueError(f'bytes {begin} to {begin + count} of {nbytes} are out of order')
            found += [(end, begin)] if begin > end else []
            end = begin + count
        return found + ([(end, nbytes)] if nbytes > end else [])

    def copy(self, base: Bytes, payload: Bytes) -> None:
        """Copy the ranges from the earlier payload; `rest` has checked them."""
        for here, there, count in self.ranges:
            payload[here : here + count] = base[there : there + count]


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Merge adjacent ranges."""
    found: list[Range] = []
    for here, there, count in ranges:
        begin, from_, before = found[-1] if found else (-1, -1, 0)
        if (begin + before, from_ + before) == (here, there):
            found[-1] = begin, from_, before + count
        else:
            found.append((here, there, count))
    return found
