# SPDX-License-Identifier: Apache-2.0
"""Bounds the rate at which a thread moves bytes over a link that training, or others, use too."""

import time
from collections.abc import Callable


class TokenBucket:
    """Holds a thread up until so many bytes more may go. One thread uses it.

    Bytes may go ahead of the rate by `burst`, never by more, whatever was not used before.

    Args:
        wait: given seconds, 0 or more, waits as long; True: there is no use in it any more.
        burst: bytes.
        clock: seconds, of any clock that does not jump.
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
        self._paid_at = -float('inf')
        """When all bytes that were taken will have had their time."""
        self.held_up = 0
        """How often bytes had to wait."""

    def take(self, nbytes: int, bytes_per_s: float | None) -> bool:
        """Wait until `nbytes` more may go at this rate; None: they may at once.

        Returns:
            True: the wait was ended, and nothing more need be.
        """
        seconds = 0.0
        if bytes_per_s is not None:
            now = self._clock()
            earliest = now - self._burst / bytes_per_s
            self._paid_at = max(self._paid_at, earliest) + nbytes / bytes_per_s
            seconds = max(self._paid_at - now, 0.0)
        self.held_up += seconds > 0
        return bool(self._wait(seconds))
