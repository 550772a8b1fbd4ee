# SPDX-License-Identifier: Apache-2.0
"""Lets one rank of a node read from the store what all ranks of the node need.

It leaves a copy in the memory of the node, named by the digest of its content. No rank depends on
another: a rank that has waited too long for the copy, or cannot use it, asks the store.
"""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_128

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import private

_LOCK = 'brought.lock'
_PREFIX = 'brought-'
_LONGEST_WAIT_S = 1.0
_PAUSE_S = 0.005


def digest_of(content: bytes) -> bytes:
    """Digest of `content`, 16 bytes long."""
    return xxh3_128(content).digest()


class NodeCopy:
    """Copies that the ranks of a node share.

    `root` is a directory in a tmpfs; `directory`, below it, belongs to this run on this node, and
    is created when needed.
    """

    def __init__(self, root: Path, directory: Path) -> None:
        self._root = root
        self._directory = directory

    def read(self, digest: bytes, from_store: Callable[[], bytes]) -> bytes:
        """The content with this digest; one rank of the node at a time asks the store.

        Raises `DistError` if this rank asked the store, and it did not answer.
        """
        try:
            private.make_directories(self._root, self._directory)
            lock = private.open_file(self._directory / _LOCK, os.O_RDWR | os.O_CREAT)
        except (HostMemoryError, OSError):
            return from_store()
        try:
            has_lock = _acquire(lock)
            found = self._found(digest)
            if found is None:
                found = from_store()
                if has_lock:
                    self._leave(digest, found)
            return found
        finally:
            os.close(lock)

    def _found(self, digest: bytes) -> bytes | None:
        try:
            file = private.open_file(self._path(digest), os.O_RDONLY)
            with open(file, 'rb') as opened:
                content = opened.read()
        except (HostMemoryError, OSError):
            return None
        return content if digest_of(content) == digest else None

    def _leave(self, digest: bytes, content: bytes) -> None:
        with suppress(HostMemoryError, OSError):  # the others ask the store
            for path in self._directory.glob(f'{_PREFIX}*'):  # of earlier rendezvous
                path.unlink(missing_ok=True)
            file = private.open_file(self._path(digest), os.O_WRONLY | os.O_CREAT)
            with open(file, 'wb') as opened:
                opened.write(content)

    def _path(self, digest: bytes) -> Path:
        return self._directory / f'{_PREFIX}{digest.hex()}'


def _acquire(lock: int) -> bool:
    """Acquire the lock; False if another rank holds it for too long."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
