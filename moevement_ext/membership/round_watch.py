# SPDX-License-Identifier: Apache-2.0
"""Watches the round on separate threads, so that no rank waits for a dead one.

Each process has a watchdog beside it, which kills it when it hangs (see `system/watchdog.py`), and
each death ends the round: by its launcher, by the coordinator, or by a rank that lost a connection.
A process whose training thread alone is stuck ends the round itself.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, Store

from moevement_ext.errors import EXIT_STUCK
from moevement_ext.logger import logger_of
from moevement_ext.membership.counters import LONGEST_PERIOD_S, send_heartbeat
from moevement_ext.membership.rendezvous import complete_end, end_round, how_broken, is_over
from moevement_ext.system.leaving import end_at_once

logger = logger_of(__name__)

LOOK_S = 0.5
"""Seconds between two checks of the training thread."""
LOOKS_PER_HEARTBEAT = round(LONGEST_PERIOD_S / LOOK_S)
_LONG = timedelta(days=365)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 10.0
_JOIN_S = 5.0


class Connections:
    """Connections to the store that threads of one round leave to those of the next. Any thread.

    `connect` opens one, which costs name lookups at both ends and a greeting. Without reuse, all
    ranks would load the store and the name server at the same moment after a failure.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._idle: deque[Store] = deque()

    def take(self) -> Store:
        """A connection for the calling thread alone, idle or new."""
        try:
            return self._idle.popleft()
        except IndexError:
            return self._connect()

    def give_back(self, store: Store) -> None:
        """Release a connection from `take`; its last request was answered."""
        self._idle.append(store)


@dataclass(eq=False)
class RoundWatch:
    """Watches one round until it is broken or `stop` is called.

    Sends heartbeats from `start` until `stop`, even after the end of the round, as this process
    will join the next one: ranks that wait for it there know that it is only late.

    Args:
        connections: connections to the launcher's store; each of the two threads takes one.
        round_id: of the one this process takes part in.
        rank: of this process.
        on_broken: called once, with the reason; wakes up waiting threads. On a watching thread, or
            on the thread that calls `conclude`.
        on_check: called twice a second on the looking thread, with its connection.
    """

    _connections: Connections
    round: int
    _rank: int
    _on_broken: Callable[[str], None]
    _on_check: Callable[[Store], None] = lambda store: None

    def __post_init__(self) -> None:
        self.broken = threading.Event()
        self.reason: str | None = None
        self.announced = 0.0
        """When the round ended: seconds since the epoch, by the announcing process's clock."""
        self._stopping = threading.Event()
        self._to_end: str | None = None
        self._stirred = threading.Event()
        self._concluding = threading.Lock()
        self._loss_logged = False
        self._threads = [
            threading.Thread(target=self._run, args=(body,), name='sparse-ckpt-watch', daemon=True)
            for body in (self._wait, self._look)
        ]

    def start(self) -> 'RoundWatch':
        for thread in self._threads:
            thread.start()
        return self

    def conclude(self, reason: str, announced: float | None = None) -> None:
        """Mark the round as ended, once.

        Any thread. Returns when all waiting threads are woken up. `announced` is the time of the
        end; None: now.
        """
        with self._concluding:
            if not (self._stopping.is_set() or self.broken.is_set()):
                self.announced = time.time() if announced is None else announced
                self.reason = reason
                self.broken.set()
                self._wake_up(reason)

    def _wake_up(self, reason: str) -> None:
        try:
            self._on_broken(reason)
        except Exception:  # the waits would last forever, with heartbeats
            logger.exception('rank %d cannot end its waits', self._rank)
            end_at_once(EXIT_STUCK)

    def wait_until_woken(self) -> None:
        """If the round is over, return when all waiting threads are woken up."""
        with self._concluding:
            pass

    def end_soon(self, reason: str) -> None:
        """Let the looking thread end the round. Any thread; does not block."""
        self._to_end = reason
        self._stirred.set()

    def stop(self) -> None:
        """Stop watching. The threads end by themselves when the round ends."""
        self._stopping.set()
        self._stirred.set()
        self.wait_until_woken()

    def join(self) -> None:
        """Wait for the end of the threads, after `stop` and the end of the round."""
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _run(self, body: Callable[[Store], None]) -> None:
        delay = _FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                store = self._connections.take()
                body(store)
                self._connections.give_back(store)
                return
            except DistError as error:
                self._log_loss(error)
            self._stopping.wait(delay)
            delay = min(2 * delay, _LAST_RETRY_S)

    def _log_loss(self, error: DistError) -> None:
        if not (self._loss_logged or self._stopping.is_set()):
            self._loss_logged = True
            logger.warning('the connection to the store of the launcher was lost: %s', error)

    def _wait(self, store: Store) -> None:
        """The store wakes this thread up when the round is ended; there is no polling."""
        store.wait([f'broken/{self.round}'], _LONG)
        self._conclude_by(store)

    def _conclude_by(self, store: Store) -> None:
        how = how_broken(store, self.round)
        if how.hangs == self._rank:
            logger.error('rank %d replaces itself: %s', self._rank, how.reason)
            end_at_once(EXIT_STUCK)
        self.conclude(how.reason, how.since)
        complete_end(store, self.round)

    def _look(self, store: Store) -> None:
        """Check the training thread; detect the end of the round if the wake-up is lost."""
        looks = self._rank  # the ranks of a job send their heartbeats at different looks
        while not self._is_stopped_within(LOOK_S):
            if self._to_end is not None and not self.broken.is_set():
                end_round(store, self.round, self._to_end)
                self._conclude_by(store)
            self._on_check(store)
            looks += 1
            if looks % LOOKS_PER_HEARTBEAT == 0:
                send_heartbeat(store, self._rank)
                if not self.broken.is_set() and is_over(store, self.round):
                    self._conclude_by(store)

    def _is_stopped_within(self, seconds: float) -> bool:
        self._stirred.wait(seconds)
        self._stirred.clear()
        return self._stopping.is_set()
