# SPDX-License-Identifier: Apache-2.0
"""A worker's death, known before the kernel has freed the memory of the worker.

Connections of a dead process close, and its pidfd becomes readable, only when all its memory is
freed: about 0.2 s per GB of mapped windows. Earlier, as soon as a thread of the process ends, the
kernel releases the robust mutexes that this thread holds. So the training thread of a worker holds
one, for which a thread of the process that has started the worker waits.
"""

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

VARIABLE = 'MOEVEMENT_DEATH_NOTICE'
"""Environment variable of a worker: path of the file with its mutex."""
_SHARED = _ROBUST = 1
_ATTRIBUTES_BYTES = 64
_UNHELD_S = 0.1
_TO_DIE_S = 120.0
_TO_STOP_S = 1.0
_TRIES, _PAUSE_S = 10, 0.01
_STATUS = 49  # of the fields after the name in `/proc/<pid>/stat`


_libc = ctypes.CDLL(None)
_held: list[mmap.mmap] = []


class DeathNotice:
    """Waits for the death of one worker, whose environment needs `variables`.

    `dies` is called on a thread of this object, and again if `close` is not within two minutes.
    Raises `OSError` without room for a file.
    """

    def __init__(self, dies: Callable[[], None]) -> None:
        self._fd = os.memfd_create('moevement-death-notice')
        self.variables = {VARIABLE: f'/proc/{os.getpid()}/fd/{self._fd}'}
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(self._fd, mmap.PAGESIZE)
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _libc.pthread_mutex_init(_mutex(self._memory), attributes)
        self._dies = dies
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name='launch-notice', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait no longer; the worker has ended."""
        self._closed.set()
        self._thread.join(_TO_STOP_S)
        os.close(self._fd)

    def _run(self) -> None:
        mutex = _mutex(self._memory)
        while not self._closed.is_set():
            found = _libc.pthread_mutex_trylock(mutex)
            if found == errno.EBUSY:
                found = _libc.pthread_mutex_lock(mutex)
            if found not in (0, errno.EOWNERDEAD):
                return  # not locked: glibc would follow pointers of the worker
            _libc.pthread_mutex_unlock(mutex)
            if found == errno.EOWNERDEAD:
                self._dies()
                if not self._closed.wait(_TO_DIE_S):
                    self._dies()
                return
            self._closed.wait(_UNHELD_S)  # the worker does not hold it yet


def hold() -> None:
    """Let the launcher see at once when this process dies. Called by the training thread."""
    path = os.environ.get(VARIABLE)
    if path is None or _held:
        return
    with suppress(OSError):  # in a container of its own; its death is seen later
        with open(path, 'r+b', buffering=0) as file:
            memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        for _ in range(_TRIES):  # the launcher may be looking at it
            if _libc.pthread_mutex_trylock(_mutex(memory)) == 0:
                return _held.append(memory)
            time.sleep(_PAUSE_S)


def signal_that_kills(pid: int) -> int:
    """The signal that ends a process, which may not have ended yet; 0: none does."""
    with suppress(OSError):
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
        return int(fields[_STATUS]) & 0x7F
    return 0


def _mutex(memory: mmap.mmap) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * mmap.PAGESIZE).from_buffer(memory)
