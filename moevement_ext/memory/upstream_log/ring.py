# SPDX-License-Identifier: Apache-2.0
"""The ring of an upstream log: allocation of regions, and the maps of its file.

Regions are contiguous, freed at either end, and never moved. Each change of the ring's size makes a
new map.
"""

import mmap
from collections import deque
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch

from moevement_ext.memory.device import pin
from moevement_ext.memory.mapped_file import map_anew, map_first, release_range
from moevement_ext.memory.upstream_log.record import region_bytes


class _Region(NamedTuple):
    start: int
    end: int


class Ring:
    """Allocator of regions in a ring of `capacity` bytes; not thread-safe.

    A region begins at a multiple of 64 and never wraps: if it does not fit before the end of
    the ring, it begins at 0, and the tail stays unused until the ring comes around again. While
    the target size `limit` is below `capacity`, regions beyond it are the last choice.
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


class RingMap:
    """The first bytes of the file. Every copy to them and every reader must keep this object.

    With `pinned`, CUDA registers the pages for the lifetime of the object; the caller's current
    device must be set (`bind_thread`). Raises `HostMemoryError` if CUDA cannot.

    Attributes:
        array: uint8 view over the whole map.
        bytes: the same, as a tensor.
        readers: number of threads that read here; with the lock of the log.
    """

    def __init__(self, path: Path, mapped: mmap.mmap, pinned: bool) -> None:
        self.path = path
        self.array = np.frombuffer(mapped, np.uint8)
        self.bytes = torch.from_numpy(self.array)
        self.readers = 0
        self._pinned = pinned
        if pinned:
            pin(self)

    @classmethod
    def of_size(cls, path: Path, nbytes: int, pinned: bool, create: bool = True) -> Self:
        """Resize the file and map it; content within the new size stays.

        Errors also as of `map_anew`, and `FileNotFoundError` for a missing file, unless `create`.
        """
        return cls(path, map_anew(path, nbytes, create=create), pinned)

    def first(self, nbytes: int) -> Self:
        """Map fewer bytes of the same file; `OSError` or `ValueError` if the file is gone."""
        return type(self)(self.path, map_first(self.path, nbytes), self._pinned)

    def give_back(self, first: int) -> None:
        """Free the pages from byte `first` on; they must not be read or written afterwards."""
        release_range(self.array, first, self.array.size)
