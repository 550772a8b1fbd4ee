# SPDX-License-Identifier: Apache-2.0
"""Expected effective training time of dense and sparse checkpointing, by closed formulas.

ETTR is useful iteration seconds (T for each iteration that is kept) divided by wall seconds.
T is `iteration_s`, I `interval`, W `window`; the other letters stand with their fields.
Failures come one at a time with exponential gaps of mean M, on the wall clock: they hit iterations,
stalls, restarts and recoveries alike; a recovery that is hit starts over, restart included.

An operation of s undisturbed seconds that starts over after a failure takes M (e^(s/M) - 1) on
average. Both exact forms follow by renewal: let a failed attempt of a seconds be followed by a
repair of q seconds (which itself starts over after a failure) and another attempt. Its mean time E
solves E = (1 - e^(-a/M)) (M + M (e^(q/M) - 1) + E), that is E = M e^(q/M) (e^(a/M) - 1). An attempt
is a whole period with dense checkpointing, and one iteration with sparse checkpointing.

The best interval of dense checkpoints follows: with a fixed overhead o per iteration, the mean time
of a period over its useful time is smallest where (1 - tau/M) e^((tau + c)/M) = 1, tau = I (T + o).
The restart time does not matter for the best interval.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from moevement_ext.plan.strategy.dense import daly_s, young_s

from ..model import fields
from ..model.fields import Checked, NotNegative, Positive, PositiveOrInfinite, Share, Whole

LONGEST_WINDOW = 1_000_000
"""Limit of W, beyond which the sums over a window would take too long."""
Window = Annotated[int, Meta(ge=1, le=LONGEST_WINDOW, description='give a whole number from 1 to '
                   f'{LONGEST_WINDOW}')]  # fmt: skip
_BISECTIONS = 200


def attempts_s(attempt_s: float, repair_s: float, mtbf_s: float) -> float:
    """Mean seconds until an attempt succeeds, if a repair follows every failed attempt.

    M e^(q/M) (e^(a/M) - 1) for an attempt of a and a repair of q seconds; infinity if that exceeds
    floating point; a without failures.
    """
    if math.isinf(mtbf_s):
        return attempt_s
    try:
        return mtbf_s * math.exp(repair_s / mtbf_s) * math.expm1(attempt_s / mtbf_s)
    except OverflowError:
        return math.inf


def first_order[Number: (float, np.ndarray)](
    iteration_s: Number, overhead_s: Number, recovery_s: Number, mtbf_s: Number
) -> Number:
    """1/(1 + o/T) x 1/(1 + E[R]/M), for numbers or arrays that broadcast (paper, appendix C)."""
    return 1 / (1 + overhead_s / iteration_s) / (1 + recovery_s / mtbf_s)


class Dense(Checked, frozen=True):
    """The whole state is saved every `interval` iterations; a failure rolls back all stages."""

    iteration_s: Positive
    interval: Whole
    overhead_s: NotNegative = 0.0
    """o, seconds that checkpointing adds to each iteration on average."""
    stall_s: NotNegative = 0.0
    """c, seconds that training waits, once per checkpoint."""
    restart_s: NotNegative = 0.0
    """r, seconds from a failure until training continues from the last checkpoint."""
    mtbf_s: PositiveOrInfinite = math.inf
    """M, mean seconds between failures of the job; inf: none."""

    @property
    def step_s(self) -> float:
        return self.iteration_s + self.overhead_s

    @property
    def period_s(self) -> float:
        """I (T + o) + c, seconds from one checkpoint to the next without a failure."""
        return self.interval * self.step_s + self.stall_s

    @property
    def mean_overhead_s(self) -> float:
        """O + c/I, seconds added to each iteration on average, stalls included."""
        return self.overhead_s + self.stall_s / self.interval

    @property
    def period(self) -> int:
        return self.interval

    def ettr_first_order(self) -> float:
        """1 / (1 + o'/T) x 1 / (1 + E[R]/M) with o' = o + c/I (paper, appendix C)."""
        overhead_s, recovery_s = self.mean_overhead_s, self.expected_recovery_s()
        return first_order(self.iteration_s, overhead_s, recovery_s, self.mtbf_s)

    def ettr_exact(self) -> float:
        """I T over the mean seconds of a period, M e^(r/M) (e^(L/M) - 1) (Daly's renewal form)."""
        useful_s = self.interval * self.iteration_s
        return useful_s / attempts_s(self.period_s, self.restart_s, self.mtbf_s)

    def expected_recovery_s(self) -> float:
        """I T/2 + r: restart and repeated iterations after one failure (paper, appendix C).

        The failure is uniformly distributed over the period, and no second failure follows.
        """
        return self.interval * self.iteration_s / 2 + self.restart_s


class Sparse(Checked, frozen=True):
    """Windows of `window` iterations back to back; a failure costs a conversion and a replay.

    A failure at position p = 0..W-1 of a window aborts the running iteration. The recovery consists
    of the restart, the W conversion iterations of the last persisted window, p full iterations, and
    then the aborted iteration again.
    """

    iteration_s: Positive
    window: Window
    overhead_s: NotNegative = 0.0
    """o, seconds that checkpointing adds to each iteration, except to replayed ones."""
    restart_s: NotNegative = 0.0
    """r, seconds from a failure until the replay begins."""
    mtbf_s: PositiveOrInfinite = math.inf
    """M, mean seconds between failures of the job; inf: none."""
    local_saving: Share = 0.0
    """Share of a replayed iteration that is saved because only the failed stages compute, without a
    pipeline bubble."""
    frozen_saving: Share = 0.0
    """Share of an operator's work that is saved while it is frozen (no weight gradient, no
    update)."""
    frozen_shares: tuple[float, ...] | None = None
    """Share of the work that is frozen in each conversion iteration, one per slot; None: (W - j)/W
    in the j-th, for operators of equal popularity."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frozen_shares is not None:
            good = len(self.frozen_shares) == self.window
            rule = f'give one share for each of the {self.window} slots'
            fields.require(good, 'frozen_shares', self.frozen_shares, rule)
            for value in self.frozen_shares:
                fields.number('frozen_shares', value, Share)

    @property
    def mean_overhead_s(self) -> float:
        return self.overhead_s

    @property
    def period(self) -> int:
        return self.window

    @property
    def step_s(self) -> float:
        return self.iteration_s + self.overhead_s

    def active_iterations(self) -> float:
        """Full iterations that take as long as the W conversion iterations; W without savings."""
        frozen = (self.window - 1) / 2 if self.frozen_shares is None else sum(self.frozen_shares)
        return self.window - frozen * self.frozen_saving

    def conversion_s(self) -> np.ndarray:
        """Seconds of each conversion iteration without waits for slots; shape [W]."""
        frozen = 1 - np.arange(1, self.window + 1) / self.window
        if self.frozen_shares is not None:
            frozen = np.array(self.frozen_shares)
        seconds: np.ndarray = 1 - frozen * self.frozen_saving
        return seconds * self.iteration_s * (1 - self.local_saving)

    def recovery_s(self) -> np.ndarray:
        """Q_p, seconds of restart and replay after a failure at position p; shape [W]."""
        replayed = self.active_iterations() + np.arange(self.window)
        return self.restart_s + replayed * self.iteration_s * (1 - self.local_saving)

    def ettr_first_order(self) -> float:
        """1 / (1 + o/T) x 1 / (1 + E[R]/M) (paper, appendix C)."""
        recovery_s = self.expected_recovery_s()
        return first_order(self.iteration_s, self.overhead_s, recovery_s, self.mtbf_s)

    def ettr_exact(self) -> float:
        """W T over the mean seconds of a window, the sum over p of M e^(Q_p/M) (e^(a/M) - 1).

        a = T + o. Positions are independent, as only success leaves a position.
        """
        if math.isinf(self.mtbf_s):
            return 1 / (1 + self.overhead_s / self.iteration_s)
        window_s = sum(
            attempts_s(self.step_s, float(repair_s), self.mtbf_s) for repair_s in self.recovery_s()
        )
        return self.window * self.iteration_s / window_s

    def expected_recovery_s(self) -> float:
        """Mean of Q_p over p, plus T/2 for the lost work of the aborted iteration.

        3/2 W T + r without savings (paper, appendix C): restart and repeated work after one
        failure, uniformly distributed over a window, without a second failure.
        """
        return float(self.recovery_s().mean()) + self.iteration_s / 2

    def worst_recovery_s(self) -> float:
        """Unattained supremum of the seconds of restart and repeated work.

        2 W T without restart and savings.
        """
        return float(self.recovery_s()[-1]) + self.iteration_s


# ---- intervals


def exact_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds from one checkpoint to the next that maximise ETTR, as a real number.

    tau/M = x solves x + ln(1 - x) = -c/M on (0, 1).
    """
    if stall_s == 0 or math.isinf(mtbf_s):
        return math.inf if stall_s else 0.0
    # The upper end is below 1, where the logarithm is infinite.
    low, high = 0.0, math.nextafter(1.0, 0.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle + math.log1p(-middle) > -stall_s / mtbf_s:
            low = middle
        else:
            high = middle
    return low * mtbf_s


class Intervals(NamedTuple):
    """Intervals in iterations, at least 1; inf: no checkpoints."""

    exact: float
    """The integer number of iterations with the greatest ETTR."""
    young: float
    daly: float


def optimal(dense: Dense) -> Intervals:
    """Intervals for the stall, overhead and MTBF of `dense`, whose own interval is ignored.

    Without a stall a checkpoint costs nothing, and all three are 1. Without failures no checkpoint
    is worth its stall, and all three are infinite.
    """

    def iterations(seconds: float) -> float:
        return seconds if math.isinf(seconds) else max(1, round(seconds / dense.step_s))

    # Period time over useful time decreases up to the real optimum and increases after it.
    best = exact_s(dense.stall_s, dense.mtbf_s)
    if math.isfinite(best):
        below = max(1, math.floor(best / dense.step_s))
        best = min((below, below + 1), key=lambda interval: _log_cost(dense, interval))
    rules = young_s(dense.stall_s, dense.mtbf_s), daly_s(dense.stall_s, dense.mtbf_s)
    return Intervals(best, *map(iterations, rules))


def _log_cost(dense: Dense, interval: int) -> float:
    """ln((e^(L/M) - 1) / I), finite for any length of a period."""
    periods = replace(dense, interval=interval).period_s / dense.mtbf_s
    if periods == 0:
        return -math.inf
    return periods + math.log(-math.expm1(-periods)) - math.log(interval)
