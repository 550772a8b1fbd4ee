# SPDX-License-Identifier: Apache-2.0
"""Deadline of a rendezvous, extended while missing ranks still send heartbeats."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

# Several heartbeats.
_BETWEEN_HEARTBEATS_S = 30.0


class Deadline[One]:
    """Ends after a time in which not all that are missing were heard of. One thread.

    Args:
        timeout: that time; heartbeats are asked for when it has passed.
        heartbeats: heartbeats of those that are missing; empty if that is not known.

    Attributes:
        until: by `time.monotonic`; look again then.
    """

    def __init__(
        self, timeout: timedelta, heartbeats: Callable[[], Mapping[One, int]] = dict
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        self._heartbeats = heartbeats
        self._heard: Mapping[One, int] | None = None
        self._ends = self.until = time.monotonic() + self._timeout_s

    def is_over(self) -> bool:
        """True once no rank is waited for any longer."""
        now = time.monotonic()
        if now < self.until:
            return False
        before, self._heard = self._heard, self._heartbeats()
        if before is None and self._heard:  # they have one more chance to be heard
            self._ends = now + _BETWEEN_HEARTBEATS_S
        elif before is not None and _all_rose(before, self._heard):
            self._ends = now + self._timeout_s
        self.until = min(now + _BETWEEN_HEARTBEATS_S, self._ends)
        return now >= self._ends


def _all_rose[One](before: Mapping[One, int], now: Mapping[One, int]) -> bool:
    return bool(now) and all(count != before.get(one) for one, count in now.items())
