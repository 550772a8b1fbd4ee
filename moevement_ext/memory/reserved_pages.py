# SPDX-License-Identifier: Apache-2.0
"""Pages reserved on a node for ranks that may join it, in files that these ranks take over.

A spare node reserves as much memory as the ranks of the largest node use, before any node is lost.
A joining rank renames a file, so that no page is reserved twice or lost in between; if none is
left, it reserves its own pages.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory import private
from moevement_ext.memory.budget import gib
from moevement_ext.memory.cgroup import memory_left
from moevement_ext.memory.mapped import map_anew
from moevement_ext.memory.node_store import NodeStore

logger = logger_of(__name__)


class ReservedPages:
    """The reserved files of one run on one node. Any thread and process."""

    def __init__(self, store: NodeStore) -> None:
        self._root = store.root
        self.path = store.reserved
        self._ended = threading.Event()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Replace all earlier files by files of these sizes; if they do not all fit, keep none."""
        self.remove()
        left, needed = memory_left(), sum(sizes)
        if left is not None and needed > left.nbytes:
            logger.warning(
                'no pages are reserved for ranks that may start here: they take %s, and the memory '
                'limit (%s) leaves %s',
                gib(needed), left.cgroup or 'MemAvailable', gib(left.nbytes),
            )  # fmt: skip
            return
        try:
            private.make_directories(self._root, self.path)
            for number, nbytes in enumerate(sizes):
                if self._ended.is_set():
                    break
                map_anew(self.path / str(number), max(nbytes, 1))
        except (HostMemoryError, OSError) as error:  # a joining rank reserves its own pages
            logger.warning('no pages are reserved for ranks that may start here: %s', error)
            self.remove()

    def end(self) -> None:
        """Stop `reserve` before its next file. Call `remove` once `reserve` has returned."""
        self._ended.set()

    def take(self, nbytes: int, to: Path) -> bool:
        """Rename the smallest file of at least `nbytes`, or the largest, to `to`; False if none."""
        while sizes := self._sizes():
            large = [name for name, size in sizes.items() if size >= nbytes]
            name = min(large, key=sizes.__getitem__) if large else max(sizes, key=sizes.__getitem__)
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                os.rename(self.path / name, to)
                return True
        return False

    def nbytes(self) -> int:
        """Bytes of the files that no rank has taken."""
        return sum(self._sizes().values())

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # ranks of this node have files
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()

    def _sizes(self) -> dict[str, int]:
        try:
            private.check_directories(self._root, self.path)
            names: Collection[str] = os.listdir(self.path)
        except (FileNotFoundError, HostMemoryError):
            return {}
        found = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.stat(self.path / name).st_blocks * 512
        return found
