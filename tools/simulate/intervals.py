# SPDX-License-Identifier: Apache-2.0
"""How often to take a dense checkpoint: Young's and Daly's approximations, and the exact optimum.

With overhead o per iteration fixed, the mean time of a period M e^(r/M) (e^((tau + c)/M) - 1) over
its useful time is smallest where (1 - tau/M) e^((tau + c)/M) = 1, tau = I (T + o). The restart time
does not matter for the best interval.
"""

import math
from dataclasses import dataclass, replace

from tools.simulate.closed_form import Dense

_BISECTIONS = 200


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


def exact_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds from one checkpoint to the next that maximise ETTR, if they may be any number.

    tau/M = x solves x + ln(1 - x) = -c/M on (0, 1).
    """
    if stall_s == 0 or math.isinf(mtbf_s):
        return math.inf if stall_s else 0.0
    # The upper end stays below 1, where the logarithm is infinite.
    low, high = 0.0, math.nextafter(1.0, 0.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle + math.log1p(-middle) > -stall_s / mtbf_s:
            low = middle
        else:
            high = middle
    return low * mtbf_s


@dataclass(frozen=True)
class Intervals:
    """Intervals in iterations, at least 1; inf: never take a checkpoint."""

    exact: float
    """The whole number of iterations with the greatest ETTR."""
    young: float
    daly: float


def optimal(dense: Dense) -> Intervals:
    """Intervals for the stall, overhead and MTBF of `dense`; its own interval does not matter.

    Without a stall a checkpoint costs nothing by itself and all three are 1. Without failures none
    is worth its stall and all three are infinite.
    """

    def iterations(seconds: float) -> float:
        return seconds if math.isinf(seconds) else max(1, round(seconds / dense.step_s))

    return Intervals(
        exact=_exact(dense),
        young=iterations(young_s(dense.stall_s, dense.mtbf_s)),
        daly=iterations(daly_s(dense.stall_s, dense.mtbf_s)),
    )


def _exact(dense: Dense) -> float:
    """Period time over useful time falls up to the real optimum and rises after it."""
    seconds = exact_s(dense.stall_s, dense.mtbf_s)
    if math.isinf(seconds):
        return math.inf
    below = max(1, math.floor(seconds / dense.step_s))
    return min((below, below + 1), key=lambda interval: _log_cost(dense, interval))


def _log_cost(dense: Dense, interval: int) -> float:
    """ln((e^(L/M) - 1) / I), which no period is too long for."""
    periods = replace(dense, interval=interval).period_s / dense.mtbf_s
    if periods == 0:
        return -math.inf
    return periods + math.log(-math.expm1(-periods)) - math.log(interval)
