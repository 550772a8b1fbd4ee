# SPDX-License-Identifier: Apache-2.0
"""One live process holds the directory of a rank: an flock that dies with the process."""

import fcntl
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path

from moevement_ext.errors import UserError
from moevement_ext.memory import private


class StoreInUseError(UserError):
    """A live process already holds the directory of this rank."""


class HolderLock:
    """An flock on a file, held until released or until this process, not its forks, is gone.

    Args:
        path: the file, in a directory that is this user's alone.

    Raises:
        StoreInUseError: a live process has it.
        ForeignFileError: the file is not ours.
        OSError: the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self._fd = private.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(self._fd, 300).decode(errors='replace') or 'unknown'
            os.close(self._fd)
            raise StoreInUseError(
                f'{path.parent} is in use by the live process {who}: another job runs with the '
                f'same --sparse-ckpt-run-id. Give each job its own --sparse-ckpt-run-id, or end '
                f'the other job first.'
            ) from None
        except OSError:
            os.close(self._fd)
            raise
        with suppress(OSError):  # on a full file system the lock holds, but does not say whose
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f'{os.getpid()} on {socket.gethostname()}'.encode(), 0)
        _LIVE_LOCKS.add(self)

    def release(self) -> None:
        """Give up the lock; in a fork, which never had it, nothing happens."""
        if self in _LIVE_LOCKS:
            _LIVE_LOCKS.discard(self)
            os.close(self._fd)

    def forget(self) -> None:
        """Close the descriptor that a forked child has inherited; the parent keeps its lock."""
        os.close(self._fd)


# An flock lives as long as any inherited descriptor. Data loader workers that outlive a killed
# trainer for a moment would lock out its successor, so forked children drop it at once.
_LIVE_LOCKS: 'weakref.WeakSet[HolderLock]' = weakref.WeakSet()


def _drop_inherited_locks() -> None:
    for lock in list(_LIVE_LOCKS):
        lock.forget()
    _LIVE_LOCKS.clear()


os.register_at_fork(after_in_child=_drop_inherited_locks)
