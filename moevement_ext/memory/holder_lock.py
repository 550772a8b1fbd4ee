# SPDX-License-Identifier: Apache-2.0
"""Lock on the directory of a rank: an flock that ends with its process.

A killed process holds the lock until the kernel has freed all its memory, which takes tens of
seconds for memory that a GPU has used. So a restarted job takes the lock by `taken`, which waits.
"""

import fcntl
import os
import re
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moevement_ext.errors import UserError
from moevement_ext.logger import logger_of
from moevement_ext.memory import private_file
from moevement_ext.memory.file_system import is_in_memory

logger = logger_of(__name__)

LOCK_S = 10.0
"""Longest wait for an earlier process of the job, which may be about to end."""
TO_DIE_S = 120.0
"""Longest wait for a process that is ending, or was killed."""
ELSEWHERE_S = 180.0
"""Longest wait for a process of another host. If that host is gone, the network file system frees
the lock with the host's lease (NFS: 90 s by default), or evicts the host (Lustre: up to 150 s)."""

_PAUSE_S = 0.1
_PF_EXITING = 0x4
_SIGKILL_PENDING = re.compile(r'^(?:SigPnd|ShdPnd):\t[0-9a-f]*[1-9a-f][0-9a-f]{2}$', re.MULTILINE)


class StoreInUseError(UserError):
    """A process holds the directory, perhaps on another host; it is waited for `patience_s`."""

    def __init__(self, message: str, patience_s: float) -> None:
        super().__init__(message)
        self.patience_s = patience_s


class HolderLock:
    """An flock on a file, held until `release` or the end of this process (not of its forks).

    Raises:
        StoreInUseError: a live process has the lock.
        ForeignFileError: the file does not belong to this user alone.
        OSError: the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self._fd = private_file.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._fd, 300).decode(errors='replace')
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise _in_use(path.parent, holder) from None
            raise
        with suppress(OSError):  # on a full file system the lock works, without its holder's name
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f'{os.getpid()} on {socket.gethostname()}'.encode(), 0)
        _LIVE_LOCKS.add(self)

    def release(self) -> None:
        """Release the lock; does nothing in a fork, which never held it."""
        if self in _LIVE_LOCKS:
            _LIVE_LOCKS.discard(self)
            os.close(self._fd)


def taken(path: Path) -> HolderLock:
    """Wait until an earlier process releases the lock; `path` and errors as for `HolderLock`."""
    return _patiently(lambda: HolderLock(path))


def is_held(path: Path) -> bool:
    """True if a process holds the lock. The shared lock taken here excludes no other reader."""
    try:
        with private_file.opened(path, os.O_RDONLY) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, private_file.ForeignFileError):
        pass  # of another user, or a file system without locks
    return False


def wait_until_free(path: Path, job: str) -> None:
    """Wait for an ending process of `job`; `StoreInUseError` if it stays alive."""

    def require_free() -> None:
        if is_held(path):
            holder = ''
            with suppress(OSError):
                holder = path.read_text(errors='replace')
            raise _in_use(path.parent, holder, job)

    _patiently(require_free)


def _patiently[Found](attempt: Callable[[], Found]) -> Found:
    """The result of `attempt`, repeated while the process that it names is waited for."""
    began = time.monotonic()
    logged = False
    while True:
        try:
            return attempt()
        except StoreInUseError as error:
            if time.monotonic() - began >= error.patience_s:
                raise
            if error.patience_s > LOCK_S and not logged:
                logger.warning('waiting up to %.0f s: %s', error.patience_s, error)
                logged = True
        time.sleep(_PAUSE_S)


def _in_use(path: Path, holder: str, job: str = 'another job') -> StoreInUseError:
    """The error about a directory that `job` has locked by the process in the lock file."""
    if _dies(holder):
        return StoreInUseError(
            f'{path} is in use by process {holder}, which was killed but still waits in the '
            f'kernel: see dmesg; this machine may have to be restarted.',
            TO_DIE_S,
        )
    host = holder.partition(' on ')[2]
    if host not in ('', socket.gethostname()) and not is_in_memory(path):
        return StoreInUseError(
            f'{path} is in use by process {holder}: if that host is gone, the file system frees '
            f'the lock after some minutes; else {job} runs with the same '
            f'--sparse-ckpt-run-id: give each its own.',
            ELSEWHERE_S,
        )
    return StoreInUseError(
        f'{path} is in use by the live process {holder or "unknown"}: {job} runs with the '
        f'same --sparse-ckpt-run-id. Give each job its own --sparse-ckpt-run-id, or end the '
        f'other job first.',
        LOCK_S,
    )


def _dies(holder: str) -> bool:
    pid, _, host = holder.partition(' on ')
    if not pid.isdecimal() or host != socket.gethostname():
        return False
    try:
        stat = Path(f'/proc/{pid}/stat').read_text(errors='replace')
        status = Path(f'/proc/{pid}/status').read_text(errors='replace')
    except OSError:  # the process is gone, or invisible from here
        return False
    flags = int(stat.rpartition(')')[2].split()[6])
    return bool(flags & _PF_EXITING) or _SIGKILL_PENDING.search(status) is not None


# An flock lives as long as any inherited descriptor. Data loader workers that outlive a killed
# trainer for a moment would lock out its successor, so forked children drop the lock at once.
_LIVE_LOCKS: 'weakref.WeakSet[HolderLock]' = weakref.WeakSet()


def _drop_inherited_locks() -> None:
    for lock in list(_LIVE_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_drop_inherited_locks)
