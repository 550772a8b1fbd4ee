# SPDX-License-Identifier: Apache-2.0
"""Allocation in a ring of bytes: contiguous regions, freed at either end, never moved."""

from collections import deque
from typing import NamedTuple

from moevement_ext.memory.window.slot import ALIGNMENT, align_up


class _Region(NamedTuple):
    start: int
    end: int


class Ring:
    """Allocator of regions in a ring of `capacity` bytes; not thread-safe.

    A region begins at a multiple of 64 and never wraps: if it does not fit before the end of
    the ring, it begins at 0, and the tail stays unused until the ring comes around again. No
    region is empty, so the ring is empty exactly when there is no region. While the target size
    `limit` is below `capacity`, a region is placed beyond it only if there is no room before
    it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self.limit = capacity
        self._regions: deque[_Region] = deque()  # oldest first

    def allocate(self, nbytes: int) -> int | None:
        """Allocate the newest region; returns its offset in bytes, None if there is no room now."""
        start = self._place(region_bytes(nbytes))
        if start is not None:
            self._regions.append(_Region(start, start + region_bytes(nbytes)))
        return start

    def fits(self, nbytes: int) -> bool:
        return self._place(region_bytes(nbytes)) is not None

    def free_oldest(self) -> None:
        self._regions.popleft()

    def free_newest(self) -> None:
        self._regions.pop()

    def resize(self, capacity: int) -> None:
        """Enlarge the ring; new space is used once the newest region lies behind the oldest."""
        self.capacity = self.limit = capacity

    def shrink(self) -> bool:
        """Reduce the capacity to `limit`, unless a region lies beyond it; True if it shrank."""
        if self.limit >= self.capacity:
            return False
        if self._regions:
            oldest, newest = self._regions[0], self._regions[-1]
            if newest.start < oldest.start or newest.end > self.limit:
                return False  # once wrapped, the ring may still have regions near its end
        self.capacity = self.limit
        return True

    def _place(self, size: int) -> int | None:
        if not self._regions:
            return 0 if size <= self.capacity else None
        oldest, newest = self._regions[0], self._regions[-1]
        if newest.start < oldest.start:  # wrapped: the space between them is free
            return newest.end if newest.end + size <= oldest.start else None
        if newest.end + size <= self.limit:
            return newest.end
        if size <= oldest.start:
            return 0
        return newest.end if newest.end + size <= self.capacity else None


def region_bytes(nbytes: int) -> int:
    """Bytes that a record of `nbytes` takes in the ring."""
    return max(align_up(nbytes), ALIGNMENT)
