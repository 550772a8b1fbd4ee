# SPDX-License-Identifier: Apache-2.0
"""Deadline of a rendezvous, extended while missing ranks still send heartbeats."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

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
        self._heard: Mapping[Absent, int] | None = None
        self._ends = self.until = time.monotonic() + self._timeout_s

    def is_over(self) -> bool:
        """True once the wait must end."""
        now = time.monotonic()
        if now < self.until:
            return False
        before, self._heard = self._heard, self._heartbeats()
        if before is None and self._heard:  # the next counts show whether they still rise
            self._ends = now + _BETWEEN_HEARTBEATS_S
        elif before is not None and _all_rose(before, self._heard):
            self._ends = now + self._timeout_s
        self.until = min(now + _BETWEEN_HEARTBEATS_S, self._ends)
        return now >= self._ends


def _all_rose(before: Mapping[Absent, int], now: Mapping[Absent, int]) -> bool:
    return bool(now) and all(count != before.get(one) for one, count in now.items())
