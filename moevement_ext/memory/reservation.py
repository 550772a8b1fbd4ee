# SPDX-License-Identifier: Apache-2.0
"""Pages of a rank's files, reserved before the rank has built its model.

The model determines the sizes of the files. A replacement needs the same files as the lost process,
and the ranks of a job have listed them for it. On a node without these files, reserving their pages
is the longest step of a start (0.4 s of CPU time for 1 GB). The files get the names of free files,
so that the set-up finds them and completes a partial set. The set-up also takes over the maps, of
new and of existing files, since the page tables of 1 GB take 0.2 s.

A spare node reserves as much memory as the ranks of the largest node use, before any node is lost.
A joining rank renames a file, so that no page is reserved twice or lost in between; if none is
left, it reserves its own pages.
"""

import contextlib
import os
import queue
import re
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory import private_file
from moevement_ext.memory.file_system import free_bytes, gib
from moevement_ext.memory.holder_lock import StoreInUseError
from moevement_ext.memory.limits import memory_left
from moevement_ext.memory.mapped_file import (
    in_pages,
    map_anew,
    prepare_map,
    prepare_map_of_existing,
)
from moevement_ext.memory.node_store import STUB, NodeStore
from moevement_ext.memory.window.name import free_name

logger = logger_of(__name__)

_LOG = 'upstream-log'
_WINDOWS = '*.window'
_OF_OWNER = re.compile(rf'({STUB})?[0-9]+|')
_THREADS = 8


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
            limit = f'the memory limit ({left.cgroup or "MemAvailable"}) leaves {gib(left.nbytes)}'
            what = 'no pages are reserved for ranks that may start here: they take %s, and %s'
            logger.warning(what, gib(needed), limit)
            return
        try:
            private_file.make_directories(self._root, self.path)
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
            private_file.check_directories(self._root, self.path)
            names: Collection[str] = os.listdir(self.path)
        except (FileNotFoundError, HostMemoryError):
            return {}
        found = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.stat(self.path / name).st_blocks * 512
        return found


class _KeptFile(msgspec.Struct, frozen=True):
    """A file that a rank keeps in host memory."""

    directory: str
    """Relative to the directory of the rank; empty: that directory itself."""
    nbytes: int
    reserved: int
    """Bytes with pages, from the beginning."""


_FILES = msgspec.msgpack.Decoder(list[_KeptFile])


def kept_by(store: NodeStore, holder: int) -> list[_KeptFile]:
    path = store.holder_path(holder)
    found = []
    for file in [*sorted(path.glob(f'*/{_WINDOWS}')), *path.glob(_LOG)]:
        try:
            status = file.stat()
        except FileNotFoundError:  # a peer renames replicas meanwhile
            continue
        directory = '' if file.parent == path else str(file.parent.relative_to(path))
        reserved = min(status.st_blocks * 512, status.st_size)
        found.append(_KeptFile(directory, status.st_size, reserved))
    return found


def encode(files: Sequence[_KeptFile]) -> bytes:
    """Encode the list that a rank leaves for its replacement and for the launcher."""
    return msgspec.msgpack.encode(files)


def decode(files: bytes) -> list[_KeptFile]:
    """Inverse of `encode`. Raises `msgspec.MsgspecError` for other bytes."""
    return _FILES.decode(files)


def sizes_in(files: bytes) -> list[int]:
    return [file.reserved for file in decode(files)]


def bytes_in(files: bytes) -> int:
    """Bytes of the files, once all their pages are reserved."""
    return sum(in_pages(file.nbytes) for file in decode(files))


def owners_in(files: bytes) -> set[int]:
    """Ranks whose windows, or stubs, are in the files."""
    return {int(one.directory.removeprefix(STUB)) for one in decode(files) if one.directory}


class EarlyReservation:
    """Reserves and maps the files of a rank on background threads.

    If the directory already has window files, only these are mapped. If the files do not all fit,
    none are created; after an error, those created are deleted: the set-up reserves the memory
    then. No other code may use `store` before `wait` returns.
    """

    def __init__(self, store: NodeStore, holder: int, files: Sequence[_KeptFile]) -> None:
        self._store = store
        self._path = store.holder_path(holder)
        self._pages = ReservedPages(store)
        self._missing: queue.SimpleQueue[tuple[str, _KeptFile | None]] = queue.SimpleQueue()
        self._created: list[str] = []
        self._failed = threading.Event()
        self._threads: list[threading.Thread] = []
        try:
            store.lock(holder)  # waits for an earlier process that is still ending
        except (StoreInUseError, HostMemoryError, OSError) as error:
            logger.warning('host memory is not reserved early: %s', error)
            return
        if there := [*self._path.glob(f'*/{_WINDOWS}')]:
            for path in [*there, *self._path.glob(_LOG)]:
                self._missing.put((str(path.relative_to(self._path)), None))
        elif self._fits(files):
            numbers = Counter[str]()
            for file in files:
                name = f'{file.directory}/{free_name(numbers[file.directory])}'
                numbers[file.directory] += 1
                self._missing.put((name if file.directory else _LOG, file))
        for _ in range(min(_THREADS, self._missing.qsize())):
            thread = threading.Thread(
                target=self._reserve_all, name='sparse-ckpt-reserve', daemon=True
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait for the threads, on the training thread, before it reserves other files.

        Once it has reserved them, it must call `mapped_file.forget_prepared_maps`.
        """
        for thread in self._threads:
            thread.join()
        if self._failed.is_set():
            for name in self._created:
                (self._path / name).unlink(missing_ok=True)
        self._store.close()

    def _fits(self, files: Sequence[_KeptFile]) -> bool:
        if not all(_OF_OWNER.fullmatch(file.directory) for file in files):
            return False
        left = memory_left()
        needed = sum(file.reserved for file in files) - self._pages.nbytes()
        return needed <= free_bytes(self._path) and (left is None or needed <= left.nbytes)

    def _reserve_all(self) -> None:
        while not self._failed.is_set():
            try:
                name, file = self._missing.get_nowait()
            except queue.Empty:
                return
            try:
                if file is None:
                    prepare_map_of_existing(self._path / name)
                    continue
                path = self._path / name
                private_file.make_directories(self._store.root, path.parent)
                self._created.append(name)
                self._pages.take(file.reserved, path)
                prepare_map(path, file.nbytes, file.reserved)
            except (HostMemoryError, OSError, ValueError) as error:  # I6: the set-up decides
                logger.warning('host memory is not reserved early: %s', error)
                self._failed.set()
