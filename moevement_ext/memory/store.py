# SPDX-License-Identifier: Apache-2.0
"""Window files of one node: which exist, which may be overwritten, and what survives a restart.

Directory ``<root>/<run id>/<node>/<holder>/<owner>/`` with one file per generation, named by state:

    free-<k>.window                nothing of value
    writing-<start>-<plan>.window  being filled, worthless until committed
    window-<start>-<plan>.window   committed: whole and immutable (invariant I3)

Commit is a rename; a file gets another name *before* its first byte is overwritten. So the names
alone tell a restarted process, or any reader, what can be trusted.
"""

import enum
import itertools
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moevement_ext.memory import private
from moevement_ext.memory.budget import HostMemoryError
from moevement_ext.memory.holder_lock import HolderLock
from moevement_ext.memory.refused import RefusedWindow, TruncatedWindow
from moevement_ext.memory.slot import SlotHeader, WindowName
from moevement_ext.memory.window_file import WindowFile

logger = logging.getLogger(__name__)

_PATH_PART = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,200}')
_PLAN = re.compile(r'[A-Za-z0-9_]{1,100}')
_COMMITTED = re.compile(r'window-(\d{1,18})-([A-Za-z0-9_]{1,100})\.window')


class WindowRef(NamedTuple):
    """A committed window of one owner."""

    start: int
    plan: str
    path: Path


class FoundWindow(NamedTuple):
    """A committed window found on this node."""

    holder: int
    owner: int
    start: int
    plan: str
    path: Path


class NodeStore:
    """The directory of one run on one node; safe to construct in every rank of the node.

    Args:
        root: directory in a tmpfs, e.g. ``/dev/shm/moevement-1000``.
        run_id: ``--sparse-ckpt-run-id``.
        node: name of this node (or of this emulated node).
    """

    def __init__(self, root: Path, run_id: str, node: str) -> None:
        for flag, part in (('--sparse-ckpt-run-id', run_id), ('node name', node)):
            if not _PATH_PART.fullmatch(part):
                raise ValueError(
                    f'{flag} {part!r} is used as a directory name: it must begin with a letter '
                    f'or digit and have only letters, digits, ".", "_" and "-"'
                )
        self.root = Path(root)
        self.run_id = run_id
        self.path = self.root / run_id / node
        self._locks: dict[int, HolderLock] = {}

    def holder_path(self, holder: int) -> Path:
        """Return the directory of everything rank ``holder`` keeps."""
        return self.path / str(holder)

    def ledger_path(self, holder: int) -> Path:
        """Return the path of the ledger of rank ``holder``."""
        return self.holder_path(holder) / 'ledger'

    def lock(self, holder: int) -> None:
        """Claim the directory of ``holder`` for this object, until ``close`` or the process ends.

        Raises:
            StoreInUseError: another live job uses the same run id on this node.
            ForeignFileError: a directory on the way is not this user's own.
        """
        if holder not in self._locks:
            path = self.holder_path(holder)
            private.make_directories(self.root, path)
            self._locks[holder] = HolderLock(path / 'lock')

    def scan(self) -> list[FoundWindow]:
        """Return all committed windows on this node, of whichever holder, newest first.

        Only names are read and nothing stays mapped; what a file holds is verified when loaded.
        There are none in directories that are not this user's own.
        """
        try:
            private.check_directories(self.root, self.path)
        except FileNotFoundError:
            return []
        except (HostMemoryError, OSError) as error:
            logger.warning('windows of earlier processes are not used: %s', error)
            return []
        found = [
            FoundWindow(holder, owner, ref.start, ref.plan, ref.path)
            for holder, holder_path in _numbered(self.path)
            for owner, owner_path in _numbered(holder_path)
            for ref in _committed_in(owner_path)
        ]
        return sorted(found, key=lambda window: (-window.start, window.owner, window.holder))

    def close(self) -> None:
        """Release the locks; files stay for the next process."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def remove_rank(self, holder: int) -> None:
        """Delete everything ``holder`` keeps, for a clean exit, and the run if it is empty then.

        Nothing happens if this object has not locked it: it is somebody else's.
        """
        lock = self._locks.pop(holder, None)
        if lock is None:
            return
        shutil.rmtree(self.holder_path(holder), ignore_errors=True)
        lock.release()
        self._remove_empty()

    def remove(self) -> None:
        """Delete everything of this run on this node, other ranks' files included."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        self._remove_empty()

    def _remove_empty(self) -> None:
        for path in (self.path, self.path.parent):
            try:
                path.rmdir()
            except FileNotFoundError:
                continue  # another rank was faster
            except OSError:
                return  # not empty: others are still there


class _State(enum.Enum):
    FREE = 'free'
    WRITING = 'writing'
    COMMITTED = 'committed'
    ANNOUNCED = 'announced'


_KEPT = (_State.COMMITTED, _State.ANNOUNCED)


class _Generation:
    """One file and what it may be used for; ``index`` names it while it is free."""

    def __init__(self, file: WindowFile, index: int, state: _State) -> None:
        self.file = file
        self.index = index
        self.state = state


class OwnerWindows:
    """The generations of windows of one owner that one holder keeps.

    Thread-safe; every call is short (renames and a preamble), except construction, which reserves
    the memory.

    Args:
        store: store of the node; the directory of ``holder`` is locked.
        holder: rank that keeps the files (the owner itself, or a peer for its replica).
        owner: rank whose state it is.
        capacity_bytes: size of each file (``window_file.window_capacity``).
        generations: files kept. Three suffice: one persisted everywhere, one complete here but not
            yet everywhere, one being written.

    Raises:
        HostMemoryError: the files cannot be reserved.
        StoreInUseError: another live job holds the directory.
    """

    def __init__(
        self, store: NodeStore, holder: int, owner: int, capacity_bytes: int, generations: int = 3
    ) -> None:
        if generations < 2:
            raise ValueError(
                f'generations={generations}: a persisted window cannot be kept while the next is '
                f'written unless there are at least 2'
            )
        store.lock(holder)
        self.holder = holder
        self.owner = owner
        self.capacity_bytes = capacity_bytes
        self.path = store.holder_path(holder) / str(owner)
        private.make_directories(store.root, self.path)
        self._wanted = generations
        self._persisted: WindowName | None = None
        self._lock = threading.Lock()
        self._generations: list[_Generation] = []
        self._cut_off: list[SlotHeader] = []
        self._adopt()
        self._allocate()

    @property
    def newest_persisted(self) -> WindowName | None:
        """The newest window known to be persisted on every rank."""
        return self._persisted

    def begin(self, start: int, plan: str) -> WindowFile | None:
        """Open a file for a new window.

        Takes a free file, else the oldest window older than the newest persisted one, else one
        that was never announced.

        Returns:
            The file, begun, or None when every file holds a window somebody may still need; the
            caller decides whether to wait or to skip this window.

        Raises:
            ValueError: this window is already here (after a rollback call ``discard_after``).
        """
        _check_plan(plan)
        name = WindowName(start, plan)
        with self._lock:
            if self._find(name) is not None:
                raise ValueError(
                    f'{self.path}: window {start}-{plan} is already here; '
                    f'after a rollback, discard_after() must come before writing it again'
                )
            chosen = self._choose()
            if chosen is None:
                return None
            # The rename comes first: what is named window-* is never written (invariant I3).
            chosen.file.rename(self.path / f'writing-{start}-{plan}.window')
            chosen.state = _State.WRITING
            chosen.file.begin(start, plan)
            return chosen.file

    def commit(self, file: WindowFile) -> None:
        """Make a completely sealed window permanent by renaming it.

        Raises:
            TruncatedWindow: slots are missing; the file stays open for writing.
        """
        _require_complete(file)
        with self._lock:
            generation = self._writing(file)
            file.freeze()
            file.rename(self.path / _committed_name(generation.file))
            generation.state = _State.COMMITTED

    def abandon(self, file: WindowFile) -> None:
        """Give up a window being written; its file becomes free."""
        with self._lock:
            self._release(self._writing(file))

    def announce(self, start: int, plan: str) -> None:
        """Note that others were told this window is complete here: it may now be relied on."""
        with self._lock:
            generation = self._find(WindowName(start, plan))
            if generation is None or generation.state not in _KEPT:
                raise ValueError(f'{self.path}: window {start}-{plan} is not committed here')
            generation.state = _State.ANNOUNCED

    def persisted(self, start: int, plan: str) -> None:
        """Note that every rank agreed this window is persisted; older ones may be recycled.

        A window older than one already persisted changes nothing. It need not be held here: a
        holder that was cut off for a while learns that what it holds is of no use any more.
        """
        with self._lock:
            if self._persisted is None or start > self._persisted.start:
                self._persisted = WindowName(start, plan)

    def discard_after(self, start: int) -> None:
        """Free all windows that begin after ``start``, persisted or not.

        Called after a recovery that resumed from window ``start`` (-1: from a dense checkpoint or
        from iteration 0): later windows belong to a past that did not happen.
        """
        with self._lock:
            if self._persisted is not None and self._persisted.start > start:
                self._persisted = None
            for generation in list(self._generations):
                name = generation.file.name
                if generation.state is not _State.FREE and name and name.start > start:
                    self._release(generation)

    def discard(self, start: int, plan: str) -> None:
        """Free one committed window that was found to be damaged, so that it can be fetched."""
        with self._lock:
            generation = self._find(WindowName(start, plan))
            if generation is not None:
                self._release(generation)

    def committed(self) -> list[WindowRef]:
        """Return the committed windows, newest first."""
        with self._lock:
            held = [
                WindowRef(*generation.file.name, generation.file.path)
                for generation in self._generations
                if generation.state in _KEPT and generation.file.name is not None
            ]
        return sorted(held, reverse=True)

    def headers_after(self, start: int) -> list[SlotHeader]:
        """Return what was captured in windows that begin after ``start``, complete or not.

        Slots that an earlier process sealed in a window it could not complete count, too, until
        their file is needed.
        """
        with self._lock:
            files = [g.file for g in self._generations if g.state is not _State.FREE]
            headers = [header for file in files for header in _readable_headers(file)]
            return [h for h in (*headers, *self._cut_off) if h.start > start]

    def file(self, start: int, plan: str) -> WindowFile | None:
        """Return the mapped file of a committed window, None if it is not here."""
        with self._lock:
            generation = self._find(WindowName(start, plan))
            if generation is None or generation.state is _State.WRITING:
                return None
            return generation.file

    def files(self) -> list[WindowFile]:
        """Return the mapped files of all generations, e.g. to pin them before iteration 1."""
        with self._lock:
            return [generation.file for generation in self._generations]

    def _find(self, name: WindowName) -> _Generation | None:
        """Return the generation that holds, or is being written for, this window."""
        for generation in self._generations:
            if generation.state is not _State.FREE and generation.file.name == name:
                return generation
        return None

    def _writing(self, file: WindowFile) -> _Generation:
        for generation in self._generations:
            if generation.file is file and generation.state is _State.WRITING:
                return generation
        raise ValueError(f'{file.path} is not being written')

    def _choose(self) -> _Generation | None:
        for generation in self._recyclable():
            if self._fits(generation):
                return generation
            self._release(generation)  # adopted from a run with other sizes
        return None

    def _recyclable(self) -> list[_Generation]:
        """Return what may be overwritten, in the order in which to do so."""

        def age(generation: _Generation) -> int:
            name = generation.file.name
            return -1 if name is None else name.start

        free = [g for g in self._generations if g.state is _State.FREE]
        oldest = sorted((g for g in self._generations if g.state in _KEPT), key=age)
        limit = -1 if self._persisted is None else self._persisted.start
        outdated = [g for g in oldest if age(g) < limit]
        unannounced = [g for g in oldest if g.state is _State.COMMITTED and age(g) > limit]
        return free + outdated + unannounced

    def _fits(self, generation: _Generation) -> bool:
        return generation.file.capacity == self.capacity_bytes

    def _release(self, generation: _Generation) -> None:
        """Make a file free, or delete one of another size or one too many."""
        generation.file.freeze()
        if not self._fits(generation) or len(self._fitting()) > self._wanted:
            generation.file.path.unlink()
            self._generations.remove(generation)
            return
        generation.file.rename(self.path / f'free-{generation.index}.window')
        generation.state = _State.FREE

    def _fitting(self) -> list[_Generation]:
        return [generation for generation in self._generations if self._fits(generation)]

    def _adopt(self) -> None:
        """Take over the files an earlier process left."""
        refs = _committed_in(self.path)
        for ref in refs:
            try:
                file = WindowFile.open(ref.path, writable=True)
                if file.name != WindowName(ref.start, ref.plan):
                    raise RefusedWindow(f'{ref.path}: holds window {file.name}')
            except RefusedWindow as refusal:
                logger.warning('dropping a window left by an earlier process: %s', refusal)
                ref.path.unlink()
                continue
            # Whether it was announced is not known any more, so it may be relied on.
            self._generations.append(_Generation(file, self._next_index(), _State.ANNOUNCED))
        for path in sorted(self.path.glob('*.window')):
            if path.name.startswith('writing-'):
                self._cut_off += _left_in(path)
            if path.name.startswith(('free-', 'writing-')):
                self._adopt_free(path)

    def _adopt_free(self, path: Path) -> None:
        right_size = path.lstat().st_size == self.capacity_bytes
        if not right_size or len(self._fitting()) >= self._wanted:
            path.unlink()
            return
        index = self._next_index()
        try:
            file = WindowFile.adopt(path, self.capacity_bytes)
        except private.ForeignFileError as error:
            logger.warning('not adopted, but removed: %s', error)
            path.unlink()
            return
        file.rename(self.path / f'free-{index}.window')
        self._generations.append(_Generation(file, index, _State.FREE))

    def _allocate(self) -> None:
        while len(self._fitting()) < self._wanted:
            index = self._next_index()
            try:
                file = WindowFile.create(self.path / f'free-{index}.window', self.capacity_bytes)
            except HostMemoryError as error:
                raise HostMemoryError(
                    f'rank {self.holder} cannot keep {self._wanted} windows of rank {self.owner}: '
                    f'{error}'
                ) from error
            self._generations.append(_Generation(file, index, _State.FREE))

    def _next_index(self) -> int:
        used = {generation.index for generation in self._generations}
        return next(
            k
            for k in itertools.count()
            if k not in used and not (self.path / f'free-{k}.window').exists()
        )


def _left_in(path: Path) -> list[SlotHeader]:
    try:
        return _readable_headers(WindowFile.open(path))
    except RefusedWindow as refusal:
        logger.warning('not compared with: %s', refusal)
        return []


def _readable_headers(file: WindowFile) -> list[SlotHeader]:
    try:
        return file.headers()
    except RefusedWindow as refusal:
        logger.warning('not compared with: %s', refusal)
        return []


def _check_plan(plan: str) -> None:
    if not _PLAN.fullmatch(plan):
        raise ValueError(f'plan digest {plan!r} must be letters, digits and "_" (file name)')


def _committed_name(file: WindowFile) -> str:
    if file.name is None:
        raise ValueError(f'{file.path} holds no window')
    return f'window-{file.name.start}-{file.name.plan}.window'


def _require_complete(file: WindowFile) -> None:
    slots = file.slots()
    if not slots or slots != list(range(file.header(slots[0]).window)):
        raise TruncatedWindow(f'{file.path}: cannot be committed with only slots {slots}')


def _numbered(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield the subdirectories named by a rank; none if ``path`` is gone or not readable."""
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.isdecimal() and entry.is_dir():
            yield int(entry.name), entry


def _committed_in(path: Path) -> list[WindowRef]:
    try:
        names = os.listdir(path)
    except OSError:
        return []
    matches = [match for match in map(_COMMITTED.fullmatch, names) if match]
    return [WindowRef(int(match[1]), match[2], path / match[0]) for match in matches]
