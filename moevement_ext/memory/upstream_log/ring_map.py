# SPDX-License-Identifier: Apache-2.0
"""Maps of the file of an upstream log; each change of the ring's size makes a new map."""

import mmap
from pathlib import Path
from typing import Self

import numpy as np
import torch

from moevement_ext.memory.mapped import map_anew, map_first, release_range
from moevement_ext.memory.pinning import pin


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

        Raises `HostMemoryError` if there is no room, the file is not this user's, or CUDA
        cannot pin; `FileNotFoundError` for a missing file, unless `create`.
        """
        return cls(path, map_anew(path, nbytes, create=create), pinned)

    def first(self, nbytes: int) -> Self:
        """Map fewer bytes of the same file.

        Raises `HostMemoryError` if CUDA cannot pin them, `OSError` or `ValueError` if the
        file is gone.
        """
        return type(self)(self.path, map_first(self.path, nbytes), self._pinned)

    def give_back(self, first: int) -> None:
        """Free the pages from byte `first` on; they must not be read or written afterwards."""
        release_range(self.array, first, self.array.size)
