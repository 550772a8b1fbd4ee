# SPDX-License-Identifier: Apache-2.0
"""Expected effective training time of dense and sparse checkpointing, by closed formulas.

ETTR is useful iteration seconds (T for each iteration that is kept) divided by wall seconds.
T is `iteration_s`, I or W `period`; the other letters stand with their fields.
Failures come one at a time with exponential gaps of mean M, on the wall clock: they hit iterations,
stalls, restarts and recoveries alike; a recovery that is hit starts over, restart included.

An operation of s undisturbed seconds that starts over after a failure takes M (e^(s/M) - 1) on
average. Both exact forms follow by renewal: let a failed attempt of a seconds be followed by a
repair of q seconds (which itself starts over after a failure) and another attempt. Its mean time E
solves E = (1 - e^(-a/M)) (M + M (e^(q/M) - 1) + E), that is E = M e^(q/M) (e^(a/M) - 1). An attempt
is a whole period with dense checkpointing, and one iteration with sparse checkpointing.

The best interval of dense checkpoints has the smallest mean time of a period over its useful time.
The restart time does not matter for it.
"""

import math
from bisect import bisect_left

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moevement_ext.plan.strategy.dense import daly_s, young_s


class Costs(Struct, frozen=True):
    """What a system costs; the values are those of `Options`, which checks them."""

    iteration_s: float
    period: int
    """Iterations of a dense interval I, or of a window W."""
    overhead_s: float = 0.0
    """o, seconds that checkpointing adds to each iteration on average, except to replayed ones."""
    restart_s: float = 0.0
    """r, seconds from a failure until training or a replay begins."""
    mtbf_s: float = math.inf
    """M, mean seconds between failures of the job; inf: none."""

    @property
    def step_s(self) -> float:
        return self.iteration_s + self.overhead_s

    @property
    def mean_overhead_s(self) -> float:
        """Seconds added to each iteration on average, stalls included."""
        return self.overhead_s

    @property
    def unit_s(self) -> float:
        """Seconds of an attempt, of which a failure loses what is done."""
        return self.step_s

    def recovery_s(self) -> np.ndarray:
        """Seconds of the repair after each attempt of a period that failed."""
        return np.array([self.restart_s])

    def expected_recovery_s(self) -> float:
        """Seconds of restart and repeated work after one failure, which no second one follows."""
        raise NotImplementedError

    def ettr_first_order(self) -> float:
        """1 / (1 + o'/T) x 1 / (1 + E[R]/M) (paper, appendix C); o' includes stalls."""
        slower = 1 + self.mean_overhead_s / self.iteration_s
        return 1 / slower / (1 + self.expected_recovery_s() / self.mtbf_s)

    def ettr_exact(self) -> float:
        """Useful seconds of a period over their mean wall seconds, M e^(q/M) (e^(a/M) - 1) each."""
        repairs_s = self.recovery_s()
        wall_s = self.unit_s * len(repairs_s)
        if math.isfinite(self.mtbf_s):
            with np.errstate(over='ignore'):
                each = self.mtbf_s * np.exp(repairs_s / self.mtbf_s)
                wall_s = float((each * np.expm1(self.unit_s / self.mtbf_s)).sum())
        return self.period * self.iteration_s / wall_s


class Dense(Costs, frozen=True):
    """The whole state is saved every `period` iterations; a failure rolls back all stages."""

    stall_s: float = 0.0
    """c, seconds that training waits, once per checkpoint."""

    @property
    def unit_s(self) -> float:
        """I (T + o) + c, seconds from one checkpoint to the next without a failure."""
        return self.period * self.step_s + self.stall_s

    @property
    def mean_overhead_s(self) -> float:
        return self.overhead_s + self.stall_s / self.period

    def expected_recovery_s(self) -> float:
        """I T/2 + r; the failure is uniformly distributed over the period (paper, appendix C)."""
        return self.period * self.iteration_s / 2 + self.restart_s


class Sparse(Costs, frozen=True):
    """Windows of `period` iterations back to back; a failure costs a conversion and a replay.

    A failure at position p = 0..W-1 of a window aborts the running iteration. The recovery consists
    of the restart, the W conversion iterations of the last persisted window, p full iterations, and
    then the aborted iteration again.
    """

    local_saving: float = 0.0
    """Share of a replayed iteration that is saved because only the failed stages compute, without a
    pipeline bubble."""
    frozen_saving: float = 0.0
    """Share of an operator's work that is saved while it is frozen (no weight gradient, no
    update)."""
    frozen_shares: tuple[float, ...] | None = None
    """Share of the work that is frozen in each conversion iteration, one per slot; None: (W - j)/W
    in the j-th, for operators of equal popularity."""

    def conversion(self) -> np.ndarray:
        """Work of each conversion iteration, in full iterations; shape [W]."""
        frozen = 1 - np.arange(1, self.period + 1) / self.period
        if self.frozen_shares is not None:
            frozen = np.array(self.frozen_shares)
        work: np.ndarray = 1 - frozen * self.frozen_saving
        return work

    def recovery_s(self) -> np.ndarray:
        """Q_p, seconds of restart and replay after a failure at position p; shape [W]."""
        replayed = self.conversion().sum() + np.arange(self.period)
        return self.restart_s + replayed * self.iteration_s * (1 - self.local_saving)

    def expected_recovery_s(self) -> float:
        """Mean of Q_p over p, plus T/2 for the lost work of the aborted iteration.

        3/2 W T + r without savings (paper, appendix C).
        """
        return float(self.recovery_s().mean()) + self.iteration_s / 2

    def worst_recovery_s(self) -> float:
        """Unattained supremum of the seconds of restart and repeated work."""
        return float(self.recovery_s()[-1]) + self.iteration_s


# ---- intervals


def optimal(dense: Dense) -> dict[str, float]:
    """Best intervals for the stall, overhead and MTBF of `dense` by rule, in iterations.

    'exact' is the whole number with the greatest ETTR, 'young' and 'daly' are approximations.
    Without a stall a checkpoint costs nothing, and all are 1. Without failures no checkpoint is
    worth its stall, and all are infinite.
    """
    if dense.stall_s and math.isinf(dense.mtbf_s):
        return dict.fromkeys(('exact', 'young', 'daly'), math.inf)
    young, daly = (rule(dense.stall_s, dense.mtbf_s) / dense.step_s for rule in (young_s, daly_s))
    # The cost decreases up to the best interval, which is below Young's, and increases after it.
    intervals = range(1, math.ceil(young) + 1)
    shorter = bisect_left(
        intervals, True, key=lambda one: _log_cost(dense, one) <= _log_cost(dense, one + 1)
    )
    return {'exact': shorter + 1, 'young': max(1, round(young)), 'daly': max(1, round(daly))}


def _log_cost(dense: Dense, interval: int) -> float:
    """ln((e^(L/M) - 1) / I), finite for any length of a period."""
    periods = replace(dense, period=interval).unit_s / dense.mtbf_s
    return periods + math.log(-math.expm1(-periods)) - math.log(interval)
