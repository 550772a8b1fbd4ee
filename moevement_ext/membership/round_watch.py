# SPDX-License-Identifier: Apache-2.0
"""Watches the round on separate threads, so that no rank waits for a dead one.

A failure is detected in three ways, and each ends the round (see `rendezvous`): a rank that lost a
connection, or the launcher, ends it; a rank without heartbeats is reported by the rank before it,
since a stopped process breaks no connection; and a process whose training thread is stuck ends the
round itself.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, Store

from moevement_ext.errors import EXIT_STUCK
from moevement_ext.logger import logger_of
from moevement_ext.membership.counters import Heartbeats, turn_of
from moevement_ext.membership.mailbox import evict
from moevement_ext.membership.rendezvous import complete_end, end_round, how_broken, is_over
from moevement_ext.system.leaving import end_at_once

logger = logger_of(__name__)

HEARTBEAT_S = 0.5
"""Seconds between two checks of the training thread; shortest time between two heartbeats."""
SLOWEST_HEARTBEAT_S = 5.0
_HEARTBEATS_BEFORE_HUNG = 12
_TURNS_PER_CHECK_OF_THE_ROUND = 2
_LONG = timedelta(days=365)
MOST_BETWEEN_CHECKS_S = 2.0
"""Longest time between two checks that counts as silence of the other rank: this process, or its
whole machine, may have been stopped."""
_FIRST_RETRY_S = 0.5
_JOIN_S = 5.0
_LAST_RETRY_S = 30.0


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
    will join the next one. Missing heartbeats of the next rank count only after `judge`. A longer
    hang timeout makes heartbeats rarer, since all ranks load one store.

    Args:
        connections: connections to the launcher's store; each of the two threads takes one.
        round_id: of the one this process takes part in.
        rank: of this process.
        processes: process numbers by rank, to tell the launcher which one hangs.
        hang_timeout_s: seconds without a heartbeat after which a rank counts as hung; its launcher
            is asked to kill it.
        on_broken: called once, with the reason; wakes up waiting threads. On a watching thread, or
            on the thread that calls `conclude`.
        on_check: called twice a second on the heartbeat thread, with its connection.
    """

    _connections: Connections
    round: int
    _rank: int
    _processes: Sequence[int]
    _hang_timeout_s: float
    _on_broken: Callable[[str], None]
    _on_check: Callable[[Store], None] = lambda store: None

    def __post_init__(self) -> None:
        self.broken = threading.Event()
        self.reason: str | None = None
        self.announced = 0.0
        """When the round ended: seconds since the epoch, by the announcing process's clock."""
        self._watched = (self._rank + 1) % len(self._processes)
        self._period_s = heartbeat_period_s(self._hang_timeout_s)
        self._stopping = threading.Event()
        self._to_end: str | None = None
        self._stirred = threading.Event()
        self._judging = threading.Event()
        self._concluding = threading.Lock()
        self._loss_logged = False
        self._heartbeats = 0
        self._silent_s, self._checked_at = 0.0, time.monotonic()
        self._threads = [
            threading.Thread(target=self._run, args=(body,), name='sparse-ckpt-watch', daemon=True)
            for body in (self._wait, self._send_heartbeats)
        ]

    def start(self) -> 'RoundWatch':
        for thread in self._threads:
            thread.start()
        return self

    def judge(self) -> None:
        """From now on, count the next rank as hung if its heartbeats are missing for too long."""
        self._judging.set()

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
        """Let the heartbeat thread end the round. Any thread; does not block."""
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
            # Reconnect well within the hang timeout: other ranks may have reconnected already.
            delay = min(2 * delay, _LAST_RETRY_S, self._hang_timeout_s / 4)

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
        self.conclude(how.reason, how.since)
        complete_end(store, self.round)

    def _send_heartbeats(self, store: Store) -> None:
        """Send heartbeats; detect the end of the round if the other connection is silently lost."""
        own, sent_in = Heartbeats(store, self.round, self._rank), None
        pause_s = HEARTBEAT_S
        while not self._is_stopped_within(pause_s):
            if self._to_end is not None and not self.broken.is_set():
                end_round(store, self.round, self._to_end)
                self._conclude_by(store)
            self._on_check(store)
            turn, left_s = turn_of(self._rank, self._period_s)
            pause_s = min(left_s, HEARTBEAT_S)
            if turn == sent_in:
                continue
            sent_in = turn
            own.send()
            if self.broken.is_set():
                continue
            if turn % _TURNS_PER_CHECK_OF_THE_ROUND == 0 and is_over(store, self.round):
                self._conclude_by(store)
            else:
                self._check_neighbour(store, own.read(self._watched))

    def _is_stopped_within(self, seconds: float) -> bool:
        self._stirred.wait(seconds)
        self._stirred.clear()
        return self._stopping.is_set()

    def _check_neighbour(self, store: Store, heartbeats: int) -> None:
        now = time.monotonic()
        most_s = self._period_s + MOST_BETWEEN_CHECKS_S - HEARTBEAT_S
        self._silent_s += min(now - self._checked_at, most_s)
        self._checked_at = now
        if heartbeats != self._heartbeats or not self._judging.is_set():
            self._heartbeats, self._silent_s = heartbeats, 0.0
        elif self._silent_s > self._hang_timeout_s:
            self._evict(store)

    def _evict(self, store: Store) -> None:
        """Have the launcher kill and replace a hung rank, and end the round."""
        evict(store, self._watched, self._processes[self._watched])
        reason = f'rank {self._watched} has sent no heartbeat for {self._hang_timeout_s:g} s'
        end_round(store, self.round, reason)


def heartbeat_period_s(hang_timeout_s: float) -> float:
    """Seconds between two heartbeats of a rank that counts as hung after `hang_timeout_s`."""
    slowest = max(SLOWEST_HEARTBEAT_S, HEARTBEAT_S)
    return min(max(hang_timeout_s / _HEARTBEATS_BEFORE_HUNG, HEARTBEAT_S), slowest)
