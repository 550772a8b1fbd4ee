# SPDX-License-Identifier: Apache-2.0
"""Limits the rate at which a thread moves bytes over a link shared with training."""

import time
from collections.abc import Callable


class TokenBucket:
    """Delays a thread to limit its rate. One thread uses it.

    After any idle time, at most `burst` bytes exceed the rate. `wait` waits the given seconds
    (0 or more) and returns True to end the wait; `clock` returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        wait: Callable[[float], object],
        burst: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait = wait
        self._burst = burst
        self._clock = clock
        # Time at which all bytes taken so far are within the rate.
        self._paid_at = -float('inf')
        self.held_up = 0
        """Number of waits."""

    def take(self, nbytes: int, bytes_per_s: float | None) -> bool:
        """Wait until the rate (None: no limit) allows `nbytes`; True if `wait` ended the wait."""
        seconds = 0.0
        if bytes_per_s is not None:
            now = self._clock()
            earliest = now - self._burst / bytes_per_s
            self._paid_at = max(self._paid_at, earliest) + nbytes / bytes_per_s
            seconds = max(self._paid_at - now, 0.0)
        self.held_up += seconds > 0
        return bool(self._wait(seconds))
