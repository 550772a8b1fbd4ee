# SPDX-License-Identifier: Apache-2.0
"""Windows of one rank on a file system that survives the loss of all nodes' memory.

    <--sparse-ckpt-disk>/<run id>/rank<N>/
        window-<start>-<plan>.window     copied, read back and verified
        writing-<start>-<plan>.window    being written, worthless
        aside-<start>-<plan>.window      of an abandoned history: not used for recovery
        complete                         start of the newest window on the disk of all ranks
        lock                             held by the only process that may write here

A copy has the bytes of the file in memory; the unused end of the file is a hole. A copy gets its
name once the medium has it and every checksum matches the bytes that the medium returns.
"""

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moevement_ext.errors import UserError
from moevement_ext.events import probe
from moevement_ext.logger import logger_of
from moevement_ext.memory import private_file
from moevement_ext.memory.file_system import free_bytes, gib
from moevement_ext.memory.holder_lock import HolderLock, StoreInUseError, taken
from moevement_ext.memory.node_store import require_directory_name
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.name import (
    RankIdentity,
    StoredWindow,
    WindowName,
    committed_in,
    committed_name,
    names_in,
    writing_name,
)
from moevement_ext.memory.window.reader import CHUNK_BYTES, Advance, WindowReader, at_full_speed
from moevement_ext.memory.window.refusal import RefusedWindow, UnreadableWindow, unopened
from moevement_ext.memory.window.slot import SlotHeader

logger = logger_of(__name__)

KEPT = 2
"""Complete windows kept on disk; one more while it is written."""


_COMPLETE = 'complete'
_FLAG = '--sparse-ckpt-disk'
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# Bytes between two syncs. Otherwise the last sync takes as long as all the writing, and page cache
# that no process reads again fills the memory of the node.
_SYNC_BYTES = 256 * 2**20


def require_mounted(root: Path) -> None:
    """Refuse a missing `--sparse-ckpt-disk` with a `UserError`."""
    if not root.is_dir():
        raise UserError(f'{_FLAG} {root} is no directory: mount it, or make it.')


def require_writable(root: Path) -> None:
    """Check as `DiskWindows` does, with a `UserError`, but create nothing."""
    with _refused(root):
        require_mounted(root)
        private_file.require_modes(probe(root))
        private_file.check_root(root)


@contextmanager
def _refused(root: Path) -> Iterator[None]:
    """Raise errors as a `UserError` about the flag."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f'{_FLAG} {root}: windows cannot be kept there: {error}. Give a directory that '
            f'this user can write to.'
        ) from error
    except private_file.ForeignFileError as error:
        reason = error.about(_FLAG)
        try:
            private_file.require_modes(probe(root))
        except private_file.ForeignFileError as modes:
            reason = modes.about(_FLAG)
        except OSError:  # a full disk
            pass
        raise UserError(f'{_FLAG} {root}: windows cannot be kept there: {reason}') from error


def directory_of(root: Path, run_id: str, rank: int) -> Path:
    return root / run_id / f'rank{rank}'


def stored_in(directory: Path, rank: int) -> list[StoredWindow]:
    """The committed windows of a rank by file name, newest first; errors as of `names_in`."""
    return sorted(committed_in(directory, rank, rank), reverse=True)


def complete_in(directory: Path) -> int:
    """Start of the newest window that all ranks had on disk, or -1; errors as of `names_in`."""
    path = directory / _COMPLETE
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return -1
    except OSError as error:
        raise unopened(path, error) from error


class DiskWindows:
    """Directory of one rank, locked until `close` or `remove`. One thread at a time uses it.

    If `joining` a running job, it does not wait for a lost process to release the lock: reads need
    no lock, and each copy tries again. `root` (`--sparse-ckpt-disk`) must exist, as it may be below
    a mount point. `forget_other_layouts` is called once their windows are worthless.

    Raises `StoreInUseError` if another process locks the directory, and does not end, and
    `UserError` if it is not usable.
    """

    def __init__(self, root: Path, run_id: str, rank: int, joining: bool = False) -> None:
        require_directory_name('--sparse-ckpt-run-id', run_id)
        self.rank = rank
        self._lock: HolderLock | None = None
        self._is_locked = False  # or the file system has no locks
        self.forget_other_layouts: Callable[[], None] = lambda: None
        self.path = directory_of(root, run_id, rank)
        with _refused(root):
            require_mounted(root)
            private_file.make_directories(root, self.path)
            with suppress(OSError):  # a window is lost with a name above it
                for level in (self.path.parent, root):
                    _sync_directory(level)
            try:
                self._take_lock(HolderLock if joining else taken)
            except StoreInUseError as error:
                if not joining:
                    raise
                logger.warning('no window is copied there until the lock is free: %s', error)

    def _take_lock(self, take: Callable[[Path], HolderLock]) -> None:
        if not self._is_locked:
            self._lock = _locked(self.path / 'lock', take)
            self._is_locked = True
            for path in self.path.glob('writing-*.window'):
                path.unlink()

    def stored(self) -> list[StoredWindow]:
        return stored_in(self.path, self.rank)

    def has(self, name: WindowName) -> bool:
        return any(window.name == name for window in self.stored())

    def used_bytes(self) -> int:
        """Bytes on disk of all windows of this rank, including unfinished and outdated ones."""
        blocks = (path.stat().st_blocks for path in self.path.glob('*.window'))
        return 512 * sum(blocks)  # the unit of st_blocks, whatever the file system's blocks are

    def read(
        self, name: WindowName, into: WindowFile, received: Callable[[WindowFile, SlotHeader], None]
    ) -> None:
        """Copy a window into a file in memory that was begun for it; see `WindowReader.copy_into`.

        Raises `RefusedWindow` also if it is missing or another one.
        """
        with WindowReader(self.path / committed_name(name)) as reader:
            reader.verify_identity(Expected(owner=self.rank, name=name))
            reader.copy_into(into, received)

    def write(
        self, file: WindowFile, identity: RankIdentity, advance: Advance = at_full_speed
    ) -> None:
        """Copy a committed window, which must not change meanwhile, to disk, and read it back.

        Calls `advance` after every chunk; its exceptions end the copy. No partial file is left.
        Raises `StoreInUseError` while another process locks the directory, `OSError` if the file
        cannot be written, or `RefusedWindow` if the bytes read back differ from those captured.
        """
        self._take_lock(HolderLock)
        name = file.required_name()
        writing = self.path / writing_name(name)
        writing.unlink(missing_ok=True)
        try:
            _copy(file, writing, advance)
            with WindowReader(writing) as reader:
                headers = reader.verify_identity(Expected.of(identity, name))
                reader.verify_payloads(headers, advance)
            os.rename(writing, self.path / committed_name(name))
            _sync_directory(self.path)
        except BaseException:
            with suppress(OSError):
                writing.unlink(missing_ok=True)
            raise

    def discard(self, name: WindowName) -> None:
        (self.path / committed_name(name)).unlink(missing_ok=True)

    def set_aside_after(self, start: int, identity: RankIdentity) -> None:
        """Rename windows of this run and layout that begin after `start`: no recovery uses them.

        An unreadable window may be one of them, and readable later.
        """
        for window in self.stored():
            if window.name.start > start and self._is_of(window, identity):
                os.rename(window.path, self.path / f'aside-{window.name}.window')
                logger.warning(
                    '%s is set aside: training continues from an earlier iteration', window.path
                )
        if self.newest_complete() > start:
            self.note_complete(start)
        _sync_directory(self.path)

    def note_complete(self, start: int) -> None:
        """Record that all ranks have the window with this start on disk; -1: no window."""
        written = self.path / f'{_COMPLETE}.new'
        with private_file.opened(written, os.O_WRONLY | os.O_CREAT) as fd:
            os.ftruncate(fd, 0)
            os.write(fd, str(start).encode())
            os.fsync(fd)
        os.rename(written, self.path / _COMPLETE)
        _sync_directory(self.path)

    def noted_complete(self) -> bool:
        """True if `note_complete` was ever called, even with -1."""
        return _COMPLETE in names_in(self.path)

    def newest_complete(self) -> int:
        """The last start passed to `note_complete`; -1 if there is none."""
        return complete_in(self.path)

    def prune(self, kept: Collection[WindowName]) -> None:
        """Delete all windows older than the newest of `kept`, except `kept`.

        Also those of other runs and those set aside: the job has passed their iterations. Newer
        windows may be the only remains of an earlier history.
        """
        self.forget_other_layouts()
        names = {committed_name(name) for name in kept}
        past = max(name.start for name in kept)
        for path in self.path.glob('*.window'):
            if path.name not in names and _start_of(path) < past:
                path.unlink(missing_ok=True)

    def remove(self, past: int) -> None:
        """Delete everything of this rank, and the run's directory if it is empty then.

        Windows of an earlier history stay if they begin after `past`, which the job has reached.
        """
        try:
            files = [self.path / name for name in names_in(self.path) if name.endswith('.window')]
        except UnreadableWindow as refusal:
            logger.warning('windows there are kept: %s', refusal)
            self.close()
            return
        newer = [path for path in files if _start_of(path) >= past]
        if newer:
            kept = [str(path) for path in newer]
            logger.warning('%s of an earlier attempt of the job are kept', kept)
            for path in {*files}.difference(newer):
                path.unlink(missing_ok=True)
            self.close()
            return
        self.forget_other_layouts()
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        with suppress(OSError):  # NFS keeps the open lock file; or the run has other ranks
            if self.path.exists():
                self.path.rmdir()
            self.path.parent.rmdir()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _is_of(self, window: StoredWindow, identity: RankIdentity) -> bool:
        try:
            with WindowReader(window.path) as reader:
                reader.verify_identity(Expected.of(identity, window.name))
        except RefusedWindow as refusal:
            logger.warning('refused: %s', refusal)
            return isinstance(refusal, UnreadableWindow)
        return True


def _start_of(path: Path) -> int:
    """Start of a window by its file name, also of a window set aside."""
    start = path.name.split('-')[1:2]
    return int(start[0]) if start and start[0].isdecimal() else -1


def _locked(path: Path, take: Callable[[Path], HolderLock]) -> HolderLock | None:
    """The lock of a rank's directory; None on a file system without locks."""
    try:
        return take(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning('%s: %s; two jobs with one run id would not be detected', path, error)
        return None


def _copy(file: WindowFile, path: Path, advance: Advance) -> None:
    """Write the bytes of `file` to the medium, and drop them from the page cache."""
    used = file.used_bytes()
    free = free_bytes(path.parent)
    if used > free:
        aside = sum(1 for _ in path.parent.glob('aside-*'))
        raise OSError(
            f'{path.parent} has {gib(free)} free, and a window takes {gib(used)}'
            + (f' ({aside} of an earlier attempt, aside-*, may be deleted there)' if aside else '')
        )
    content = memoryview(file.array)[:used]
    with private_file.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        synced = written = 0
        while written < used:
            count = os.write(fd, content[written : written + CHUNK_BYTES])
            written += count
            if written - synced >= _SYNC_BYTES:
                os.fdatasync(fd)
                os.posix_fadvise(fd, synced, written - synced, os.POSIX_FADV_DONTNEED)
                synced = written
            advance(count)
        os.ftruncate(fd, file.capacity)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
