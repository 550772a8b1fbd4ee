# SPDX-License-Identifier: Apache-2.0
"""Windows of one rank on a file system that outlives the memory of all nodes.

    <--sparse-ckpt-disk>/<run id>/rank<N>/
        window-<start>-<plan>.window     copied, read back and right
        writing-<start>-<plan>.window    under way, worthless
        aside-<start>-<plan>.window      of a past that was not continued: not recovered from
        complete                         start of the newest window that all ranks had here
        lock                             held by the one process that may write here

A copy has the bytes of the file in memory, whose unused end is a hole. It gets its name once it is
on the medium and every checksum was compared with what the medium returns.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from moevement_ext.errors import UserError
from moevement_ext.memory import private
from moevement_ext.memory.budget import free_bytes, gib
from moevement_ext.memory.holder_lock import HolderLock, taken
from moevement_ext.memory.node_store import require_directory_name
from moevement_ext.memory.window.expected import Expected
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.file_names import committed_in, committed_name, writing_name
from moevement_ext.memory.window.name import RankIdentity, StoredWindow, WindowName
from moevement_ext.memory.window.reader import CHUNK_BYTES, Advance, WindowReader, at_full_speed
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader

logger = logging.getLogger(__name__)

KEPT = 2
"""Windows that stay on disk, of those that all ranks have there; one more while it is written."""


_COMPLETE = 'complete'
_FLAG = '--sparse-ckpt-disk'
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# Written at most before the medium has it: else the last sync takes as long as all the writing,
# and pages that nobody reads again fill the memory of the node.
_SYNC_BYTES = 256 * 2**20


def require_mounted(root: Path) -> None:
    """Refuse a `--sparse-ckpt-disk` that is not there.

    Raises:
        UserError: it is not.
    """
    if not root.is_dir():
        raise UserError(f'{_FLAG} {root} is no directory: mount it, or make it.')


class DiskWindows:
    """Directory of one rank, locked until `close` or `remove`; one thread at a time uses it.

    Args:
        root: `--sparse-ckpt-disk`, which must be there: a file system that is not mounted is not
            written below its mount point by mistake.
        run_id: `--sparse-ckpt-run-id`.
        rank: whose windows they are.

    Raises:
        StoreInUseError: another process has the directory, and does not end.
        UserError: nothing can be kept there.
    """

    def __init__(self, root: Path, run_id: str, rank: int) -> None:
        require_directory_name('--sparse-ckpt-run-id', run_id)
        self.rank = rank
        self.path = root / run_id / f'rank{rank}'
        require_mounted(root)
        try:
            private.make_directories(root, self.path)
            self._lock = _locked(self.path / 'lock')
            for path in self.path.glob('writing-*.window'):
                path.unlink()
        except OSError as error:
            raise UserError(
                f'{_FLAG} {root}: windows cannot be kept there: {error}. Give a directory that '
                f'this user can write to.'
            ) from error
        except private.ForeignFileError as error:
            reason = str(error).replace('--sparse-ckpt-dir', _FLAG)
            raise UserError(f'{_FLAG} {root}: windows cannot be kept there: {reason}') from error

    def stored(self) -> list[StoredWindow]:
        """The committed windows, newest first; by their names alone."""
        return sorted(committed_in(self.path, self.rank, self.rank), reverse=True)

    def has(self, name: WindowName) -> bool:
        """True if there is a window of that name."""
        return any(window.name == name for window in self.stored())

    def used_bytes(self) -> int:
        """Room that windows of this rank take, also unfinished and outdated ones."""
        blocks = (path.stat().st_blocks for path in self.path.glob('*.window'))
        return 512 * sum(blocks)  # the unit of st_blocks, whatever the file system's blocks are

    def read(
        self,
        name: WindowName,
        into: WindowFile,
        received: Callable[[WindowFile, SlotHeader], None],
    ) -> None:
        """Copy a window into a file in memory that was begun for it, verifying every slot there.

        Args:
            name: the window.
            into: a file for it.
            received: called with every slot that has come and is undamaged, slot 0 first.

        Raises:
            RefusedWindow: it is not there, damaged, or another one.
            FileTooSmall: `into` is.
        """
        with WindowReader(self.path / committed_name(name)) as reader:
            reader.verify_identity(Expected(owner=self.rank, name=name))
            reader.copy_into(into, received)

    def write(
        self, file: WindowFile, identity: RankIdentity, advance: Advance = at_full_speed
    ) -> None:
        """Copy a committed window here, and read it back.

        Args:
            file: in memory; it must not change meanwhile.
            identity: of this rank in this run.
            advance: called after every chunk written and read; what it raises ends the copy.

        Raises:
            OSError: it cannot be written; nothing stays behind.
            RefusedWindow: what was read back is not what was captured.
        """
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
        """Delete a window, if it is here."""
        (self.path / committed_name(name)).unlink(missing_ok=True)

    def set_aside_after(self, start: int, identity: RankIdentity) -> None:
        """Recover no more from windows that begin after `start`: their past is not continued.

        Windows of another run or layout are left alone; nobody recovers from them either.
        """
        for window in self.stored():
            if window.name.start > start and self._is_of(window, identity):
                os.rename(window.path, self.path / f'aside-{window.name}.window')
                logger.warning('%s is set aside: training goes on from before it', window.path)
        if self.newest_complete() > start:
            self.note_complete(start)
        _sync_directory(self.path)

    def note_complete(self, start: int) -> None:
        """All ranks have the window that begins with iteration `start` on disk; -1: none."""
        written = self.path / f'{_COMPLETE}.new'
        fd = private.open_file(written, os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, str(start).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(written, self.path / _COMPLETE)
        _sync_directory(self.path)

    def noted_complete(self) -> bool:
        """Something was noted, if only that no window is complete."""
        return (self.path / _COMPLETE).exists()

    def newest_complete(self) -> int:
        """What was noted last, -1 if that is nothing."""
        try:
            return int((self.path / _COMPLETE).read_text())
        except (OSError, ValueError):
            return -1

    def prune(self, kept: Collection[WindowName]) -> None:
        """Delete all windows but these that are older than the newest of them.

        That includes those of other runs and what was set aside: this life of the job has come
        past them. What is newer may be all that is left of an earlier one.
        """
        names = {committed_name(name) for name in kept}
        past = max(name.start for name in kept)
        for path in self.path.glob('*.window'):
            if path.name not in names and _start_of(path) < past:
                path.unlink(missing_ok=True)

    def remove(self, past: int) -> None:
        """Delete everything of this rank, and the run if it is empty then.

        Args:
            past: iteration that the job has come to. Windows of an earlier life that begin later
                stay.
        """
        newer = [path for path in self.path.glob('*.window') if _start_of(path) >= past]
        if newer:
            logger.warning('%s of an earlier life of the job stay', [str(path) for path in newer])
            for path in self.path.glob('*.window'):
                if path not in newer:
                    path.unlink(missing_ok=True)
            self.close()
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        with suppress(OSError):  # NFS has kept the lock, which was open; or the run has others
            if self.path.exists():
                self.path.rmdir()
            self.path.parent.rmdir()

    def close(self) -> None:
        """Let another process have the directory; nothing is written to it any more."""
        if self._lock is not None:
            self._lock.release()

    def _is_of(self, window: StoredWindow, identity: RankIdentity) -> bool:
        try:
            with WindowReader(window.path) as reader:
                reader.verify_identity(Expected.of(identity, window.name))
        except RefusedWindow as refusal:
            logger.warning('refused: %s', refusal)
            return False
        return True


def _start_of(path: Path) -> int:
    """First iteration of a window, by the name of its file, also of one that is set aside."""
    start = path.name.split('-')[1:2]
    return int(start[0]) if start and start[0].isdecimal() else -1


def _locked(path: Path) -> HolderLock | None:
    """The lock of a rank's directory; None on a file system that has none.

    Raises:
        StoreInUseError: a live process has it, and kept it while this one waited.
    """
    try:
        return taken(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning('%s: %s; two jobs of one run id would not notice', path, error)
        return None


def _copy(file: WindowFile, path: Path, advance: Advance) -> None:
    """Have the bytes of `file` on the medium, and not in the page cache."""
    used = file.used_bytes()
    free = free_bytes(path.parent)
    if used > free:
        aside = sum(1 for _ in path.parent.glob('aside-*'))
        raise OSError(
            f'{path.parent} has {gib(free)} free, and a window takes {gib(used)}'
            + (f' ({aside} of an earlier life, aside-*, may be deleted there)' if aside else '')
        )
    content = memoryview(file.array)[:used]
    fd = private.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        synced = written = 0
        while written < used:
            count = os.write(fd, content[written : written + CHUNK_BYTES])
            written += count
            if written - synced >= _SYNC_BYTES:
                _write_back(fd, synced, written)
                synced = written
            advance(count)
        os.ftruncate(fd, file.capacity)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _write_back(fd: int, begin: int, end: int) -> None:
    os.fdatasync(fd)
    os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
