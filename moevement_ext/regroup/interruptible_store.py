# SPDX-License-Identifier: Apache-2.0
"""A store whose waits end when a failure is announced.

Process groups are connected through a store, and wait in it for the addresses of their peers; one
that dies at this moment would hold up the others until they run out of time.
"""

import threading
import time
from datetime import timedelta

from torch.distributed import Store

from moevement_ext import faults
from moevement_ext.faults import Phase

_FIRST_POLL_SECONDS = 0.005
_LAST_POLL_SECONDS = 0.1
# Polls become rarer: a wait ends too late by a quarter of itself at most, or by the last pause.
_GROWTH = 1.25


class InterruptibleStore(Store):
    """Passes everything on to another store; what waits raises when `interrupted` is set.

    Keep a reference as long as torch uses it: torch holds only the part of it that is not Python.

    Args:
        store: used by the thread that uses this object.
        interrupted: ends all waits.
        timeout: of a wait, unless it names another.
    """

    def __init__(self, store: Store, interrupted: threading.Event, timeout: timedelta) -> None:
        super().__init__()
        self._store = store
        self._interrupted = interrupted
        self._timeout = timeout

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._store.set(key, value)
        faults.point(Phase.CONNECT)  # the address of this rank is published

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for keys and return their values."""
        self.wait(keys)
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Set several values."""
        self._store.multi_set(keys, values)  # type: ignore[attr-defined]

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return it."""
        return self._store.add(key, value)

    def append(self, key: str, value: str) -> None:
        """Append to a value."""
        self._store.append(key, value)  # type: ignore[attr-defined]

    def check(self, keys: list[str]) -> bool:
        """True if all keys are there."""
        return self._store.check(keys)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - torch calls it by this name
        """Remove a key."""
        return self._store.delete_key(key)

    def has_extended_api(self) -> bool:
        """Gloo then asks for several keys at once."""
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises:
            ConnectionError: interrupted.
            TimeoutError: they did not come in time.
        """
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _FIRST_POLL_SECONDS
        while not self._store.check(keys):
            if self._interrupted.is_set():
                raise ConnectionError('another failure was announced')
            if time.monotonic() > deadline:
                raise TimeoutError(f'{keys[:3]} did not come in time')
            time.sleep(pause_s)
            pause_s = min(_GROWTH * pause_s, _LAST_POLL_SECONDS)
