# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the whole state, of one slot each, every k iterations: Gemini and CheckFreq.

Gemini (Wang et al., SOSP'23) checkpoints into host memory of the rank and of its peers. The copy to
own memory must end before the next update of the state, which one iteration hides in part; traffic
to peers may take the whole interval. Longer copies and traffic stall training. A failure rolls all
stages back to the newest checkpoint of which all copies are complete.

CheckFreq (Mohan et al., FAST'21) takes a snapshot to host memory, which stalls training only for
the part that the next iteration does not hide, and persists one at a time to disk. The interval is
the shortest that keeps these stalls within a bound and that the disk sustains. It is profiled in
the first iterations and grows when later stalls exceed the bound. A recovery uses only checkpoints
that all ranks have on disk.
"""

import math
from collections.abc import Callable, Sequence

from moevement_ext.config import DALY, ORACLE
from moevement_ext.plan.byte_planner import DEFAULT_HIDDEN_FRACTION
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
        return PlanParameters(window=1, idle=(self._fixed or 1) - 1)

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


def young_s(stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 c M): seconds from one checkpoint to the next (Young, 1974)."""
    return math.sqrt(2 * stall_s * mtbf_s) if stall_s else 0.0


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds from one checkpoint to the next in Daly's higher-order form (Daly, 2006).

    sqrt(2 c M) (1 + (c/2M)^(1/2) / 3 + (c/2M) / 9) - c below c = 2 M, else M.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    if math.isinf(mtbf_s):
        return young_s(stall_s, mtbf_s)
    part = stall_s / (2 * mtbf_s)
    return young_s(stall_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - stall_s


MARGIN = 1.25
"""Factor by which another interval must be better to replace the present one."""


def best_interval(
    rule: str, iteration_s: float, checkpoint_s: tuple[float, float], mtbf_s: float
) -> int:
    """Iterations from one checkpoint to the next.

    'young' and 'daly' use the stall of a checkpoint that one iteration hides in part. 'oracle'
    tries every interval up to the one that hides the traffic, and up to Young's for the stall of
    the copy to own memory, which no interval hides: a longer interval only loses more work.

    Args:
        rule: one of `config.INTERVAL_RULES`.
        iteration_s: seconds of an iteration without checkpoints.
        checkpoint_s: seconds of a copy to host memory, and of the copy plus the sends to all peers.
        mtbf_s: mean seconds between failures.
    """
    own_s, everywhere_s = checkpoint_s
    hidden_s = DEFAULT_HIDDEN_FRACTION * iteration_s
    least_s = max(0.0, own_s - hidden_s)
    if rule == ORACLE:
        hides_rest = math.ceil((everywhere_s - own_s + min(own_s, hidden_s)) / hidden_s)
        longest = max(1, hides_rest, math.ceil(young_s(least_s, mtbf_s) / iteration_s))

        def cost(interval: int) -> float:
            stall_s = max(least_s, everywhere_s - interval * hidden_s)
            return _log_cost(interval, iteration_s, stall_s, min(interval, hides_rest), mtbf_s)

        return min(range(1, longest + 1), key=cost)
    stall_s = max(0.0, everywhere_s - hidden_s)
    seconds = (daly_s if rule == DALY else young_s)(stall_s, mtbf_s)
    return max(1, round(seconds / iteration_s))


def _log_cost(interval: int, iteration_s: float, stall_s: float, late: int, mtbf_s: float) -> float:
    """Ln of wall time over useful time, up to terms that no interval changes (Daly, renewal form).

    For L seconds from one checkpoint to the next, and r seconds of `late` iterations, which are
    lost because the newest checkpoint is not complete yet, this is r/M + ln((e^(L/M) - 1) / k).
    """
    periods = (interval * iteration_s + stall_s) / mtbf_s
    lost = late * iteration_s / mtbf_s
    return lost + periods + math.log(-math.expm1(-periods)) - math.log(interval)


def gemini(interval: int | str, mtbf_s: float) -> DenseCycles:
    """Dense checkpoints in memory, at a fixed `interval` or by one of `config.INTERVAL_RULES`."""

    def demanded(period: int, loads: Sequence[WindowLoad]) -> int | None:
        """The best interval for the slowest rank, unless the present one is nearly as good."""
        known = [load.checkpoint_s for load in loads if load.checkpoint_s is not None]
        if len(known) < len(loads):
            return None
        iteration_s = min(load.iteration_s for load in loads)
        slowest = max(own_s for own_s, _ in known), max(both_s for _, both_s in known)
        best = best_interval(str(interval), iteration_s, slowest, mtbf_s)
        return period if period / MARGIN <= best <= period * MARGIN else best

    return DenseCycles(None if isinstance(interval, str) else interval, demanded)


OVERHEAD_BOUND = 0.03
"""Maximum share of the training time for the stalls."""


def shortest_interval(iteration_s: float, stall_s: float, persist_s: float) -> int:
    """The fewest iterations from one checkpoint to the next.

    Args:
        iteration_s: seconds of an iteration without checkpoints.
        stall_s: seconds by which a checkpoint delays training.
        persist_s: seconds to persist a checkpoint on disk.
    """
    hides = math.ceil(persist_s / iteration_s)
    return max(1, hides, math.ceil(stall_s / (OVERHEAD_BOUND * iteration_s)))


def checkfreq(fixed: int | None) -> DenseCycles:
    """Dense checkpoints on disk, every `fixed` iterations (None: tuned)."""

    def demanded(period: int, loads: Sequence[WindowLoad]) -> int | None:
        """A longer interval, if the present one exceeds the bound or is too short for the disk.

        Stalls and disk times are those of the slowest rank, as the others wait for it. Only
        that rank measures an iteration without its own stall, so the shortest iteration
        counts.
        """
        persisted = [load.persist_s for load in loads if load.persist_s is not None]
        if len(persisted) < len(loads):
            return None
        iteration_s = min(load.iteration_s for load in loads)
        stall_s = max(load.waited_s for load in loads)
        return max(period, shortest_interval(iteration_s, stall_s, max(persisted)))

    return DenseCycles(fixed, demanded)
