# SPDX-License-Identifier: Apache-2.0
"""One live process holds the directory of a rank: an flock that dies with the process.

A killed process holds it until the last of its memory is given back, which takes tens of seconds
where a GPU has used that. So who has a job to go on with takes it by `taken`, which waits.
"""

import fcntl
import os
import re
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from moevement_ext.errors import UserError
from moevement_ext.memory import private

LOCK_SECONDS = 10.0
"""A process of an earlier life of the job is waited for at most; it may be about to end."""
TO_DIE_SECONDS = 120.0
"""The same, of one that is ending, or was killed."""

_PAUSE_SECONDS = 0.1
_PF_EXITING = 0x4
_SIGKILL_PENDING = re.compile(r'^(?:SigPnd|ShdPnd):\t[0-9a-f]*[1-9a-f][0-9a-f]{2}$', re.MULTILINE)


class StoreInUseError(UserError):
    """A live process already holds the directory of this rank.

    Attributes:
        dies: it is on its way out.
    """

    dies = False


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
            who = os.read(self._fd, 300).decode(errors='replace')
            os.close(self._fd)
            raise _in_use(path.parent, who) from None
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


def taken(path: Path) -> HolderLock:
    """The lock, once an earlier process has let go of it; arguments and errors of `HolderLock`."""
    began = time.monotonic()
    while True:
        try:
            return HolderLock(path)
        except StoreInUseError as error:
            if time.monotonic() - began >= (TO_DIE_SECONDS if error.dies else LOCK_SECONDS):
                raise
        time.sleep(_PAUSE_SECONDS)


def _in_use(path: Path, who: str) -> StoreInUseError:
    """What to say of who has a directory: "<process id> on <host>", or nothing."""
    if _dies(who):
        error = StoreInUseError(
            f'{path} is in use by process {who}, which was killed and does not die: it waits in '
            f'the kernel, see dmesg; this machine may have to be restarted.'
        )
        error.dies = True
        return error
    return StoreInUseError(
        f'{path} is in use by the live process {who or "unknown"}: another job runs with the same '
        f'--sparse-ckpt-run-id. Give each job its own --sparse-ckpt-run-id, or end the other job '
        f'first.'
    )


def _dies(who: str) -> bool:
    """Whether a process of this machine is about to end, as far as can be known."""
    pid, _, host = who.partition(' on ')
    if not pid.isdecimal() or host != socket.gethostname():
        return False
    try:
        stat = Path(f'/proc/{pid}/stat').read_text(errors='replace')
        status = Path(f'/proc/{pid}/status').read_text(errors='replace')
    except OSError:  # it is gone, or is not to be seen from here
        return False
    flags = int(stat.rpartition(')')[2].split()[6])
    return bool(flags & _PF_EXITING) or _SIGKILL_PENDING.search(status) is not None


# An flock lives as long as any inherited descriptor. Data loader workers that outlive a killed
# trainer for a moment would lock out its successor, so forked children drop it at once.
_LIVE_LOCKS: 'weakref.WeakSet[HolderLock]' = weakref.WeakSet()


def _drop_inherited_locks() -> None:
    for lock in list(_LIVE_LOCKS):
        lock.forget()
    _LIVE_LOCKS.clear()


os.register_at_fork(after_in_child=_drop_inherited_locks)
