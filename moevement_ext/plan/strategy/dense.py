# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the whole state, of one slot each, every k iterations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from moevement_ext.plan.replanning import PlanParameters, WindowLoad

CONFIRMED = 2
"""Cycles in a row that must demand another interval."""


class DenseCycles(ABC):
    """An interval that is fixed, or follows what is measured.

    It changes once `CONFIRMED` cycles in a row demand that, and then as little as they demand: a
    hiccup in one of them changes nothing. All ranks change at the same iteration, as with any plan.

    Args:
        fixed: k; None: `demanded` decides, and the first cycles are of one iteration.
    """

    counts_tokens = False

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        # Intervals demanded in cycles of the present one, the newest ones.
        self._seen: list[int] = []
        self._period = 0

    @abstractmethod
    def demanded(self, period: int, loads: Sequence[WindowLoad]) -> int | None:
        """The interval to go over to, mostly `period`; None: not enough is measured yet.

        Args:
            period: the present interval.
            loads: measurements of every rank in one cycle.
        """

    def first(self) -> PlanParameters:
        """All of the state in one slot."""
        return PlanParameters(0, 0, 1, {}, idle=(self._fixed or 1) - 1)

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """The same with another interval."""
        if self._fixed is not None:
            return None
        demanded = self.demanded(present.period, loads)
        if demanded is None:
            return None
        if self._period != present.period:
            self._period, self._seen = present.period, []
        self._seen = [*self._seen, demanded][-CONFIRMED:]
        interval = self._confirmed(present.period)
        if interval == present.period:
            return None
        return PlanParameters(
            present.version + 1, present.after(loads[0].start), 1, {}, idle=interval - 1
        )

    def _confirmed(self, period: int) -> int:
        if len(self._seen) == CONFIRMED and min(self._seen) > period:
            return min(self._seen)
        if len(self._seen) == CONFIRMED and max(self._seen) < period:
            return max(self._seen)
        return period
