# SPDX-License-Identifier: Apache-2.0
"""Reconnects to the store in which the ranks meet, and detects its loss.

Lost connections are opened again; connections to a store that does not answer are closed (see
`store_answers`). The store counts as lost when it is unreachable for longer than a process may be
silent, or when another store answers in its place: that one belongs to the next attempt of the job.
A store that was stopped with its launcher, and answers again, no longer counts as lost.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, DistStoreError, Store

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.logger import logger_of
from moevement_ext.regroup.waits import in_time
from moevement_ext.store_answers import AnswerWatch, peek

logger = logger_of(__name__)

_ATTEMPT = 'attempt'
_TO_CONNECT_S = 15.0
# All ranks send requests at the same time in a rendezvous.
_LEAST_TO_ANSWER_S = 10.0
_PAUSE_S = 0.2
# Longest time counted beyond an answer's limit: this process itself may have been stopped.
_MOST_A_TRY_S = 2.0


class StoreLost(SparseCheckpointError):
    """The ranks can no longer meet; only the whole job can restart."""


class StoreLoss:
    """Connects threads to the store, and detects its loss. Any thread.

    Args:
        store: a connection of the constructing thread; it is cloned.
        timeout_s: seconds after which an unreachable store counts as lost.
        on_lost: called when the store counts as lost, on a separate thread.

    Attributes:
        attempt: random name of this store, equal on all ranks.
        lost: set while the store is lost.
    """

    def __init__(
        self, store: Store, timeout_s: float, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self.attempt = _attempt_of(store)
        self.lost = threading.Event()
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=min(_TO_CONNECT_S, timeout_s)))
        self._timeout_s = timeout_s
        self._to_answer_s = max(timeout_s / 2, _LEAST_TO_ANSWER_S)
        self._answers = AnswerWatch(self._store, self._to_answer_s)
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._seeking = self._replaced = self._concluded = False
        self._closed = threading.Event()

    def connect(self) -> Store:
        """A new connection with a short timeout; `DistError` if unreachable or lost."""
        if self.lost.is_set():
            raise DistStoreError('the store is lost')
        try:
            return self._connect()
        except DistError:
            self._seek()
            raise

    def reconnect(self) -> Store:
        """Wait for a new connection; `StoreLost` if the store counts as lost."""
        while not self.lost.is_set():
            try:
                return self.connect()
            except DistError:
                self.lost.wait(_PAUSE_S)
        raise StoreLost('the store in which the ranks meet is lost')

    def close(self) -> None:
        """End the watch: the job is over, and the loss of the store does not matter."""
        self._closed.set()
        self._answers.close()

    def _connect(self) -> Store:
        store, attempt = in_time(self._another, self._to_answer_s)
        if attempt != self.attempt.encode():
            self._replaced = True
            self._conclude('another one answers in its place')
            raise DistStoreError('this is another store')
        return store

    def _another(self) -> tuple[Store, bytes | None]:
        store = self._store.clone()
        return store, peek(store, _ATTEMPT)

    def _seek(self) -> None:
        with self._lock:
            if self._seeking:
                return
            # No thread can start now; the next lost connection tries again.
            with suppress(RuntimeError):
                threading.Thread(target=self._run, name='sparse-ckpt-store', daemon=True).start()
                self._seeking = True

    def _run(self) -> None:
        """Try to connect until the store, or another one in its place, answers."""
        waited_s, tried, failed = 0.0, time.monotonic(), False
        while not self._closed.wait(_PAUSE_S):
            try:
                self._connect()
                break
            except DistError as error:
                now = time.monotonic()
                waited_s += min(now - tried, self._to_answer_s + _MOST_A_TRY_S)
                tried = now
                if self._replaced and self._concluded:
                    return
                if waited_s > self._timeout_s:
                    self._conclude(f'it has been unreachable for {self._timeout_s:g} s: {error}')
            except Exception:  # for example too many threads, which says nothing about the store
                tried = time.monotonic()
                if not failed:
                    logger.warning('cannot try to reconnect to the lost store', exc_info=True)
                failed = True
        with self._lock:
            self._seeking = self._concluded = False
            was_lost = self.lost.is_set()
            self.lost.clear()
        if was_lost and not self._closed.is_set():
            logger.warning('the store of the job is reachable again')

    def _conclude(self, why: str) -> None:
        with self._lock:
            known = self.lost.is_set()
            self.lost.set()
            with suppress(RuntimeError):  # no thread can start now; the next attempt tries again
                if not self._concluded:
                    threading.Thread(
                        target=self._on_lost, name='sparse-ckpt-lost', daemon=True
                    ).start()
                    self._concluded = True
        if not known:
            logger.warning('the store of the job is lost: %s', why)


def _attempt_of(store: Store) -> str:
    """Name of the store, which the first caller sets."""
    return bytes(store.compare_set(_ATTEMPT, '', secrets.token_hex(8))).decode()
