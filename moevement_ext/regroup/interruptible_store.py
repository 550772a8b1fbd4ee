# SPDX-License-Identifier: Apache-2.0
"""Waits of connecting process groups, which end when a failure is announced.

Process groups connect through a store, where they wait for the addresses of their peers. A peer
that dies at this moment would block the others until their timeout.
"""

import threading
import time
from collections.abc import Collection
from datetime import timedelta

from torch.distributed import Store

from moevement_ext import faults
from moevement_ext.faults import Phase

_FIRST_POLL_S = 0.005
_LAST_POLL_S = 0.1
# Growth of the pause between polls: a wait ends late by at most a quarter of itself, or by the
# longest pause.
_GROWTH = 1.25
_NO_ADDRESS = '\0'
_TOLD = 'in-use'
_ALL = 'in-use/all'


class InterruptibleStore(Store):
    """Forwards to another store; waits raise once `interrupted` is set.

    Keep a reference as long as torch uses the store: torch keeps only the C++ part alive.
    `timeout` is the default of a wait.
    """

    def __init__(self, store: Store, interrupted: threading.Event, timeout: timedelta) -> None:
        super().__init__()
        self._store = store
        self._interrupted = interrupted
        self._timeout = timeout

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        faults.point(Phase.CONNECT)  # the address of this rank is published

    def get(self, key: str) -> bytes:
        # A member that gives up deletes its address. If that came between a check and torch's get,
        # this connection would be blocked, and with it the next attempt to connect.
        while True:
            self.wait([key])
            # On a missing key it changes nothing, and returns the expected value.
            found = bytes(self._store.compare_set(key, _NO_ADDRESS, _NO_ADDRESS))
            if found != _NO_ADDRESS.encode():
                return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._store.multi_set(keys, values)  # type: ignore[attr-defined]

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def append(self, key: str, value: str) -> None:
        self._store.append(key, value)  # type: ignore[attr-defined]

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - torch calls it by this name
        return self._store.delete_key(key)

    def has_extended_api(self) -> bool:
        """True: gloo then requests several keys at once."""
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; `ConnectionError` if interrupted, `TimeoutError` without them in time."""
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _FIRST_POLL_S
        while not self._store.check(keys):
            if self._interrupted.is_set():
                raise ConnectionError('another failure was announced')
            if time.monotonic() > deadline:
                raise TimeoutError(f'{keys[:3]} did not come in time')
            time.sleep(pause_s)
            pause_s = min(_GROWTH * pause_s, _LAST_POLL_S)


def used_by_any(
    store: Store, size: int, used: Collection[str], asked: Collection[str], timeout: timedelta
) -> set[str]:
    """The groups of `asked` that any member has used, whose communicators are created at once.

    Collective. Training thread. torch creates a communicator at the first operation of its
    group; most groups of a job never have one. A member that creates it at once would wait for
    a member that leaves it to the first operation, and a new process does not have the list of
    groups that its predecessor used.

    Costs some store requests per member, and one per group. `store` is that of this renewal;
    `used` are the groups that this process has used. Raises `RuntimeError` or `OSError` if a
    report is missing, or the wait was interrupted.
    """
    for name in set(used) & set(asked):
        store.add(f'{_TOLD}/{name}', 1)
    if store.add(_TOLD, 1) == size:
        store.add(_ALL, 1)
    store.wait([_ALL], timeout)
    return {name for name in asked if store.check([f'{_TOLD}/{name}'])}
