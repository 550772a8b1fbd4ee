# SPDX-License-Identifier: Apache-2.0
"""Barriers, keys of the store whose creation wakes up all waiting ranks, and deadlines of waits.

A waiting rank sends no requests. The last rank to arrive opens the barrier, or the process that
ends the round closes it. Whichever comes first is final: no rank passes a barrier that another rank
has found closed. A store wakes up only the ranks that wait for a key of a given name, so a round's
barriers have fixed names.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError, Store

_OPEN, _SHUT = 'open', 'shut'
# The process that should close the barrier may have died, so a wait is not unlimited. Torch logs a
# warning after each wait.
_LONGEST_WAIT_S = 60.0
_SHORTEST_WAIT_S = 0.01


def open_barrier(store: Store, barrier: str) -> None:
    """Let all ranks pass, unless the barrier is shut."""
    store.compare_set(barrier, '', _OPEN)


def close_barrier(store: Store, barrier: str) -> None:
    """Let no rank pass, unless the barrier is already open."""
    store.compare_set(barrier, '', _SHUT)


def has_moved(store: Store, barrier: str, deadline: float) -> bool:
    """Wait until a barrier is opened or shut; False if neither happens in time.

    No other thread can use this connection meanwhile. The wait ends at `deadline` (by
    `time.monotonic`), or after a minute.
    """
    left_s = min(max(deadline - time.monotonic(), _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
    try:
        store.wait([barrier], timedelta(seconds=left_s))
    except DistStoreError:
        return False
    return True


def is_open(found: bytes | None) -> bool:
    """True if `found` is the value of an open barrier; None: its round's keys are deleted."""
    return found == _OPEN.encode()


# Several heartbeats.
_BETWEEN_HEARTBEATS_S = 30.0


class Absent(NamedTuple):
    """A rank that other ranks wait for, and the last round in which its process took part."""

    round: int
    rank: int


class Deadline:
    """Ends after a `timeout` in which some missing rank sent no heartbeat. Used by one thread.

    `heartbeats` returns the heartbeat counts of the missing ranks, or nothing if they are unknown;
    it is called once the timeout has passed. The caller checks again at `until` (by
    `time.monotonic`).
    """

    def __init__(
        self, timeout: timedelta, heartbeats: Callable[[], Mapping[Absent, int]] = dict
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        self._heartbeats = heartbeats
        self._counts: Mapping[Absent, int] | None = None
        self._ends = self.until = time.monotonic() + self._timeout_s

    def is_over(self) -> bool:
        """True once the wait must end."""
        now = time.monotonic()
        if now < self.until:
            return False
        before, self._counts = self._counts, self._heartbeats()
        if before is None and self._counts:  # the next counts show whether they still rise
            self._ends = now + _BETWEEN_HEARTBEATS_S
        elif before is not None and _all_rose(before, self._counts):
            self._ends = now + self._timeout_s
        self.until = min(now + _BETWEEN_HEARTBEATS_S, self._ends)
        return now >= self._ends


def _all_rose(before: Mapping[Absent, int], now: Mapping[Absent, int]) -> bool:
    return bool(now) and all(count != before.get(one) for one, count in now.items())
