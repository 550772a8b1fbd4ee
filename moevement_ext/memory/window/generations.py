# SPDX-License-Identifier: Apache-2.0
"""Window files of one owner in the memory of one holder, and their recycling."""

import itertools
import threading
from pathlib import Path
from typing import NamedTuple

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory import private_file
from moevement_ext.memory.device import pin_like, pinned_as_far_as
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import FileState, WindowFile
from moevement_ext.memory.window.format import GENERATIONS
from moevement_ext.memory.window.name import (
    Agreed,
    StoredWindow,
    WindowName,
    committed_in,
    committed_name,
    free_name,
    writing_name,
)
from moevement_ext.memory.window.refusal import RefusedWindow, TruncatedWindow, UnreadableWindow
from moevement_ext.memory.window.slot import SlotHeader

logger = logger_of(__name__)


class FileSize(NamedTuple):
    """Bytes of a window file."""

    capacity: int
    """Size of the longest possible window."""
    room: int
    """Bytes with pages: the size of the longest window in force."""


class OwnerWindows:
    """Generations of windows of one owner that one holder keeps.

    Thread-safe. Calls are short (renames and a preamble), but construction reserves the memory, and
    a change of the window length pins files; other calls wait for that.

    Args:
        store: store of the node; the directory of `holder` is locked.
        holder: rank that keeps the files (the owner itself, or a peer for its replica).
        owner: rank whose state it is.
        size: of each file (`format.window_capacity`); one number: all of it has pages.
        generations: number of files in rotation, at least two.
        holdable: allocate one more file, to replace a held one (`hold`).
        stubs: the files hold stubs (see `window.twin`).

    Raises:
        HostMemoryError: the files cannot be reserved.
        StoreInUseError: another live job holds the directory.
    """

    def __init__(
        self,
        store: NodeStore,
        holder: int,
        owner: int,
        size: FileSize | int,
        generations: int = GENERATIONS,
        holdable: bool = False,
        stubs: bool = False,
    ) -> None:
        store.lock(holder)
        self.holder = holder
        self.owner = owner
        self.capacity_bytes, self._room = (size, size) if isinstance(size, int) else size
        self.path = (store.stub_path if stubs else store.owner_path)(holder, owner)
        self._root = store.root
        private_file.make_directories(self._root, self.path)
        self._in_turn = generations
        self._wanted = generations + holdable
        self._agreed = Agreed()
        self._lock = threading.Lock()
        self._committed = threading.Condition(self._lock)
        self._files: list[WindowFile] = []
        self._adopt()
        self._allocate()

    @property
    def agreed(self) -> Agreed:
        return self._agreed

    @property
    def newest_persisted(self) -> WindowName | None:
        """The newest window known to be persisted on every rank."""
        return self._agreed.persisted

    def begin(self, name: WindowName, room: int = 0, fetched: bool = False) -> WindowFile | None:
        """Open a file for a new window: a free file, a given up window's, or an outdated window's.

        Args:
            name: of the window.
            room: bytes that the window takes, if windows in force may take less.
            fetched: a thread that may be abandoned fills the file. Until it calls `commit` or
                `abandon`, no other window gets the file, even if this window is discarded.

        Returns None when a recovery may still need the windows of all files (invariant I3). Raises
        `HostMemoryError` without room for a larger window, or for a file in place of a removed one;
        `ValueError` if this window exists already (call `discard_after` after a rollback), or its
        plan's digest cannot be part of a file name.
        """
        path = self.path / writing_name(name)
        with self._lock:
            if self._find(name, FileState.WRITING, FileState.COMMITTED) is not None:
                raise ValueError(
                    f'{self.path}: window {name} is already here; '
                    f'after a rollback, discard_after() must come before writing it again'
                )
            chosen = self._choose()
            if chosen is None:
                return None
            chosen.make_room(room := max(room, self._room))
            if chosen.state is not FileState.COMMITTED:
                # Else slots of an abandoned attempt at this window would get its name.
                chosen.begin(name)
            # The rename comes first: a file named window-* is never written (invariant I3).
            if chosen.path != path:
                self._free_cut_off(path)
                chosen.rename(path)
            self._fit(chosen, room)
            chosen.state = FileState.WRITING
            chosen.fetched = fetched
            chosen.begin(name)
            return chosen

    def make_room(self, room: int) -> None:
        """Reserve pages of all files for windows of this size, or free the surplus pages.

        Pages are freed when the file has no window that a recovery may need (invariant I3), here
        or in `agree`. Any thread but the training thread. Raises `HostMemoryError` if there is no
        room; the files then stay as large as before.
        """
        with self._lock:
            files = self._fitting()
        for file in files:
            file.make_room(room)
        with self._lock:
            self._room = room
            self._fit_recyclable()

    def begin_larger(self, name: WindowName, nbytes: int) -> WindowFile:
        """Create a file for a window too large for the others; it is deleted when outdated.

        Raises `HostMemoryError` if there is no room.
        """
        with self._lock:
            self._free_cut_off(path := self.path / writing_name(name))
            file = WindowFile.create(path, nbytes)
            pin_like(self._files[0], file)
            self._add(file, FileState.WRITING)
            file.begin(name)
            return file

    def commit(self, file: WindowFile) -> None:
        """Make a completely sealed window permanent by renaming it.

        Raises `TruncatedWindow` if slots are missing; the file stays open for writing.
        """
        slots = file.slots()
        if not slots or slots != list(range(file.length())):
            raise TruncatedWindow(f'cannot be committed with only slots {slots}', file.path)
        with self._lock:
            self._require_being_filled(file)
            file.freeze()
            file.rename(self.path / committed_name(file.required_name()))
            file.state, file.fetched = FileState.COMMITTED, False
            self._committed.notify_all()

    def abandon(self, file: WindowFile) -> None:
        """Free the file of an unfinished window, which the caller has filled until now."""
        with self._lock:
            fetched, file.fetched = file.fetched, False
            if fetched and file.state is FileState.FREE:
                return  # its window was discarded meanwhile
            self._require_being_filled(file)
            self._free(file)

    def agree(self, agreed: Agreed) -> None:
        """Record the ranks' newest agreement; outdated and given up windows may then be recycled.

        The windows need not exist here: a holder may have been disconnected for a while.
        """
        with self._lock:
            self._agreed = self._agreed.then(agreed)
            self._fit_recyclable()

    def persisted(self, name: WindowName) -> None:
        self.agree(self.agreed.with_persisted(name))

    def is_persisted(self, name: WindowName) -> bool:
        """True if this window, another with the same start, or a newer one is persisted."""
        return self._agreed.is_persisted(name.start)

    def is_given_up(self, name: WindowName) -> bool:
        """True if this window will never be persisted, as another rank lacks it."""
        return self._agreed.is_given_up(name.start)

    def discard_after(self, start: int) -> None:
        """Free all windows that begin after `start`, persisted or not.

        Called after a recovery that resumed from window `start` (-1: from a dense
        checkpoint or from iteration 0): later windows belong to an abandoned history.
        """
        with self._lock:
            self._agreed = self._agreed.without_persisted_after(start)
            for file in list(self._files):
                if file.state is not FileState.FREE and file.start > start:
                    self._free(file)

    def discard(self, name: WindowName) -> None:
        """Free a damaged committed window, so that it can be fetched again."""
        with self._lock:
            file = self._find(name, FileState.WRITING, FileState.COMMITTED)
            if file is not None:
                self._free(file)

    def hold(self, name: WindowName) -> WindowFile | None:
        """Protect the file of a committed window until `release`; None if the window is gone.

        Other windows use the additional file meanwhile, so that none has to wait. Raises
        `ValueError` if another file is held already.
        """
        with self._lock:
            if any(file.held for file in self._files):
                raise ValueError(f'{self.path}: only one window can be held')
            file = self._find(name, FileState.COMMITTED)
            if file is not None:
                file.held = True
            return file

    def release(self, file: WindowFile) -> None:
        """End `hold`: the file may be overwritten once its window is outdated."""
        with self._lock:
            file.held = False

    def committed(self) -> list[StoredWindow]:
        with self._lock:
            held = [
                StoredWindow(self.holder, self.owner, file.required_name(), file.path)
                for file in self._in_state(FileState.COMMITTED)
            ]
        return sorted(held, reverse=True)

    def headers_after(self, start: int) -> list[SlotHeader]:
        """Headers of sealed slots of windows that begin after `start`, complete or not.

        Also those that an earlier process sealed in an incomplete window, until its file is reused.
        """
        with self._lock:
            files = self._in_state(FileState.WRITING, FileState.COMMITTED, FileState.CUT_OFF)
            headers = [header for file in files for header in _readable_headers(file)]
            return [header for header in headers if header.start > start]

    def file(self, name: WindowName, wait_s: float = 0.0) -> WindowFile | None:
        """The file of a committed window; waits for the commit, at most `wait_s`."""
        with self._committed:
            return self._committed.wait_for(lambda: self._find(name, FileState.COMMITTED), wait_s)

    def files(self) -> list[WindowFile]:
        """Mapped files of all generations, e.g. to pin them before iteration 1."""
        with self._lock:
            return list(self._files)

    def _in_state(self, *states: FileState) -> list[WindowFile]:
        return [file for file in self._files if file.state in states]

    def _find(self, name: WindowName, *states: FileState) -> WindowFile | None:
        return next((file for file in self._in_state(*states) if file.name == name), None)

    def _require_being_filled(self, file: WindowFile) -> None:
        if file not in self._files or file.state is not FileState.WRITING:
            raise ValueError(f'{file.path} is not being written')

    def _choose(self) -> WindowFile | None:
        """Choose a file to overwrite; None if all files in rotation may be needed."""
        self._replace_removed()
        if len([file for file in self._fitting() if self._is_needed(file)]) >= self._in_turn:
            return None
        for file in self._recyclable():
            if self._fits(file):
                return file
            self._free(file)  # a file adopted from a run with other sizes
        return None

    def _recyclable(self) -> list[WindowFile]:
        """The files that may be overwritten, in order of preference."""
        free = [file for file in self._in_state(FileState.FREE) if not file.fetched]
        oldest = sorted(self._in_state(FileState.COMMITTED), key=lambda file: file.start)
        unneeded = [file for file in oldest if not self._is_needed(file) and not file.held]
        return [*free, *self._in_state(FileState.CUT_OFF), *unneeded]

    def _fit_recyclable(self) -> None:
        """Free surplus pages of files without a needed window, before they are reused."""
        for file in filter(self._fits, self._recyclable()):
            if file.room > self._room and file.state is not FileState.FREE:
                self._free(file)  # renamed first: a file named window-* keeps its bytes
            self._fit(file, self._room)

    @staticmethod
    def _fit(file: WindowFile, room: int) -> None:
        with pinned_as_far_as(file, min(room, file.room)):
            file.give_back(room)

    def _is_needed(self, file: WindowFile) -> bool:
        """True if the window is being written, or a recovery may start from it."""
        if file.state is not FileState.COMMITTED:
            return file.state is FileState.WRITING
        name = file.required_name()
        return not (self._agreed.is_outdated(name) or self._agreed.is_given_up(name.start))

    def _fits(self, file: WindowFile) -> bool:
        return file.capacity == self.capacity_bytes

    def _free(self, file: WindowFile) -> None:
        """Free a file, or delete it if it has another size or is surplus."""
        file.freeze()
        file.held = False
        if not self._fits(file) or len(self._fitting()) > self._wanted:
            file.path.unlink(missing_ok=True)
            self._files.remove(file)
            return
        try:
            file.rename(self._free_path())
        except FileNotFoundError:
            self._forget_removed(file)
            return
        file.state = FileState.FREE

    def _free_cut_off(self, path: Path) -> None:
        """Rename the file with this path that an earlier process has left, if there is one."""
        for file in self._in_state(FileState.CUT_OFF):
            if file.path == path:
                self._free(file)

    def _replace_removed(self) -> None:
        """Recreate removed files, except files of windows that may still be needed.

        The content of those remains as long as they are mapped. The replacement of a pinned
        file is not pinned, so copies to it are slower.
        """
        for file in self._recyclable():
            if not file.path.exists():
                self._forget_removed(file)
        if len(self._fitting()) < self._wanted:
            private_file.make_directories(self._root, self.path)
            self._allocate()

    def _forget_removed(self, file: WindowFile) -> None:
        logger.warning(
            '%s was removed; exclude --sparse-ckpt-dir from the cleanup of temporary files '
            '(also by systemd-logind: RemoveIPC=no, or loginctl enable-linger)',
            file.path,
        )
        self._files.remove(file)

    def _fitting(self) -> list[WindowFile]:
        return [file for file in self._files if self._fits(file)]

    def _adopt(self) -> None:
        try:
            committed = committed_in(self.path, self.holder, self.owner)
        except UnreadableWindow as refusal:
            raise HostMemoryError(str(refusal)) from refusal
        for found in committed:
            try:
                fits = found.path.lstat().st_size == self.capacity_bytes
                room = self._room if fits else None
                file = WindowFile.open(found.path, writable=True, room=room)
                if file.name != found.name:
                    raise RefusedWindow(f'holds window {file.name}', found.path)
            except RefusedWindow as refusal:
                if isinstance(refusal.__cause__, OSError) and found.path.exists():
                    raise HostMemoryError(f'{refusal}; mend that, or remove the file') from refusal
                logger.warning('dropping a window left by an earlier process: %s', refusal)
                found.path.unlink(missing_ok=True)
                continue
            self._add(file, FileState.COMMITTED)
        for path in sorted(self.path.glob('*.window'), reverse=True):  # free ones last
            if not path.name.startswith('window-'):
                self._adopt_free(path)

    def _adopt_free(self, path: Path) -> None:
        right_size = path.lstat().st_size == self.capacity_bytes
        if not right_size or len(self._fitting()) >= self._wanted:
            path.unlink()
            return
        try:
            if path.name.startswith('writing-') and self._adopt_cut_off(path):
                return
            file = WindowFile.create(path, self.capacity_bytes, self._room, reuse=True)
        except private_file.ForeignFileError as error:
            logger.warning('not adopted, but removed: %s', error)
            path.unlink()
            return
        file.rename(self._free_path())
        self._add(file, FileState.FREE)

    def _adopt_cut_off(self, path: Path) -> bool:
        """Adopt an incomplete window; False if the file is unreadable, or still has another window.

        The file keeps its name: if this process dies soon, the next one compares with it, too.
        """
        try:
            file = WindowFile.open(path, writable=True, room=self._room)
        except RefusedWindow as refusal:
            logger.warning('not used for verification: %s', refusal)
            return False
        if file.name is None or path.name != writing_name(file.name):
            return False  # the process ended between the rename and `WindowFile.begin`
        self._add(file, FileState.CUT_OFF)
        return True

    def _allocate(self) -> None:
        while len(self._fitting()) < self._wanted:
            try:
                file = WindowFile.create(self._free_path(), self.capacity_bytes, self._room)
            except HostMemoryError as error:
                raise HostMemoryError(
                    f'rank {self.holder} cannot keep {self._wanted} windows of rank {self.owner}: '
                    f'{error}'
                ) from error
            self._add(file, FileState.FREE)

    def _add(self, file: WindowFile, state: FileState) -> None:
        file.state = state
        self._files.append(file)

    def _free_path(self) -> Path:
        used = {file.path for file in self._files}  # including those of removed files
        paths = (self.path / free_name(index) for index in itertools.count())
        return next(path for path in paths if path not in used and not path.exists())


def _readable_headers(file: WindowFile) -> list[SlotHeader]:
    """Headers of sealed slots; none if they are damaged."""
    try:
        return file.headers()
    except RefusedWindow as refusal:
        logger.warning('not used for verification: %s', refusal)
        return []
