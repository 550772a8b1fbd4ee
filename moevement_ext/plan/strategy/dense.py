# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the whole state, of one slot each, every k iterations."""

from collections.abc import Callable, Sequence

from moevement_ext.plan.replanning import PlanParameters, WindowLoad

CONFIRMED = 2
"""Cycles in a row that must demand another interval."""


class DenseCycles:
    """An interval that is fixed, or follows measurements, after first cycles of one iteration.

    It changes once `CONFIRMED` cycles in a row demand a change, by the smallest demanded step,
    so an outlier in one cycle has no effect. All ranks change at the same iteration, as with
    any plan.

    Args:
        fixed: the interval in iterations; None: it follows measurements.
        demanded: returns the interval that the measurements of all ranks demand, mostly the present
            one, its first argument; None if measurements are missing.
    """

    counts_tokens = False

    def __init__(
        self, fixed: int | None, demanded: Callable[[int, Sequence[WindowLoad]], int | None]
    ) -> None:
        self._fixed = fixed
        self._demanded = demanded
        # Newest demands, from cycles of the present interval.
        self._seen: list[int] = []
        self._period = 0

    def first(self) -> PlanParameters:
        """The whole state in one slot."""
        return PlanParameters(0, 0, 1, {}, idle=(self._fixed or 1) - 1)

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """The present plan with another interval; None if it does not change."""
        if self._fixed is not None:
            return None
        demanded = self._demanded(present.period, loads)
        if demanded is None:
            return None
        if self._period != present.period:
            self._period, self._seen = present.period, []
        self._seen = [*self._seen, demanded][-CONFIRMED:]
        interval = self._confirmed(present.period)
        if interval == present.period:
            return None
        return present.changed(loads[0].start, idle=interval - 1)

    def _confirmed(self, period: int) -> int:
        if len(self._seen) == CONFIRMED and min(self._seen) > period:
            return min(self._seen)
        if len(self._seen) == CONFIRMED and max(self._seen) < period:
            return max(self._seen)
        return period
