# SPDX-License-Identifier: Apache-2.0
"""The window of `--sparse-ckpt-window auto`: follows the measured rates, and never flaps.

A longer window is taken once several windows in a row demand it though the rates were a good deal
better than measured, a shorter one once they would allow it though the rates were a good deal
worse. So rates that vary by less than that change nothing, nor does a hiccup of one window; and
what a change has led to is never undone without a change of the rates.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from moevement_ext.plan.replanning import PlanParameters, WindowLoad

logger = logging.getLogger(__name__)

FIRST_WINDOW = 2
"""Until rates are measured."""
CONFIRMED = 3
"""Windows in a row that must agree on a change."""
MARGIN = 1.25
"""By which rates may be better or worse than measured; more than they vary without a cause."""


class Measured(NamedTuple):
    """What limits a window: on the rank where each is least."""

    iteration_s: float
    """Without waits for copies."""
    copy_bytes_per_s: float
    send_bytes_per_s: float | None
    """To holders of replicas; None: nothing was sent yet, or there are none."""
    cpu_bytes_per_s: float | None = None
    """What may be captured for helper threads to keep to their share of the cores; None: any."""

    def faster(self, factor: float) -> 'Measured':
        """With all rates that much higher."""
        sent, captured = self.send_bytes_per_s, self.cpu_bytes_per_s
        return Measured(
            self.iteration_s,
            factor * self.copy_bytes_per_s,
            None if sent is None else factor * sent,
            None if captured is None else factor * captured,
        )


class AutoWindow:
    """Chooses W, on rank 0's replanner thread.

    Args:
        shortest: the fewest slots that links and cores with these rates carry; None: the links
            carry none of up to `longest`.
        longest: W that host memory is reserved for.
    """

    def __init__(self, shortest: Callable[[Measured], int | None], longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._window = 0
        self._seen: deque[Measured] = deque(maxlen=CONFIRMED)
        """In windows of the present length."""
        self._warned = False

    def __call__(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> int:
        """The next W, mostly the present one.

        Args:
            present: the plan in force in the observed window.
            loads: what every rank saw in that window.
        """
        seen = measured(loads)
        if seen is None:
            return present.window
        if self._window != present.window:
            self._window = present.window
            self._seen.clear()
        self._seen.append(seen)
        if present.version == 0:  # before anything was measured the window was a guess
            return self._demanded(seen)
        if len(self._seen) < CONFIRMED:
            return present.window
        return self._confirmed(present.window)

    def _confirmed(self, present: int) -> int:
        if all(self._demanded(seen.faster(MARGIN)) > present for seen in self._seen):
            return max(map(self._demanded, self._seen))
        return min(present, max(self._demanded(seen.faster(1 / MARGIN)) for seen in self._seen))

    def _demanded(self, seen: Measured) -> int:
        found = self._shortest(seen)
        if found is None and not self._warned:
            self._warned = True
            logger.warning(
                'no window of up to %d is long enough for the links: iterations will be longer, '
                'or windows skipped; allow a longer one (--sparse-ckpt-max-window, host memory), '
                'fewer replicas, or spread the state over more ranks',
                self._longest,
            )
        return self._longest if found is None else found


def measured(loads: Sequence[WindowLoad]) -> Measured | None:
    """The least over ranks; None: nothing was copied yet.

    All ranks wait for the one whose copies hold up its update, which alone knows of that wait.
    """
    copied = _least(load.copy_bytes_per_s for load in loads)
    if copied is None:
        return None
    return Measured(
        min(load.iteration_s for load in loads),
        copied,
        _least(load.send_bytes_per_s for load in loads),
        _least(load.cpu_bytes_per_s for load in loads),
    )


def _least(rates: Iterable[float | None]) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)
