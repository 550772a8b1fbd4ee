# SPDX-License-Identifier: Apache-2.0
"""Gemini: the whole state every k iterations, in host memory of the rank and of its peers.

Wang et al., SOSP'23. Copies and traffic that the interval does not hide stall training. A failure
rolls all stages back to the newest checkpoint of which all copies are complete.
"""

import math
from collections.abc import Sequence

from moevement_ext.config import DALY, ORACLE
from moevement_ext.plan.byte_planner import DEFAULT_HIDDEN_FRACTION
from moevement_ext.plan.replanning import WindowLoad
from moevement_ext.plan.strategy.dense import DenseCycles
from moevement_ext.plan.strategy.intervals import daly_s, young_s

MARGIN = 1.25
"""Factor by which another interval must be better to replace the present one."""


def best_interval(rule: str, iteration_s: float, checkpoint_s: float, mtbf_s: float) -> int:
    """Iterations from one checkpoint to the next, by one of `config.INTERVAL_RULES`.

    'young' and 'daly' use the stall of a checkpoint that one iteration hides in part. 'oracle'
    tries every interval up to the one that hides all of it: a longer one only loses more.
    `checkpoint_s` is the time of a copy to host memory and to all peers, `mtbf_s` the mean time
    between failures, in seconds.
    """
    hidden_s = DEFAULT_HIDDEN_FRACTION * iteration_s
    if rule == ORACLE:
        hides_all = max(1, math.ceil(checkpoint_s / hidden_s))
        return min(
            range(1, hides_all + 1),
            key=lambda k: _log_cost(k, iteration_s, checkpoint_s, hidden_s, mtbf_s),
        )
    stall_s = max(0.0, checkpoint_s - hidden_s)
    seconds = (daly_s if rule == DALY else young_s)(stall_s, mtbf_s)
    return max(1, round(seconds / iteration_s))


def _log_cost(
    interval: int, iteration_s: float, checkpoint_s: float, hidden_s: float, mtbf_s: float
) -> float:
    """Ln of wall time over useful time, up to terms that no interval changes (Daly, renewal form).

    L is the seconds from one checkpoint to the next, r the seconds of iterations that are lost
    since the newest checkpoint was not complete: r/M + ln((e^(L/M) - 1) / k).
    """
    stall_s = max(0.0, checkpoint_s - interval * hidden_s)
    late_s = math.ceil(min(interval, checkpoint_s / hidden_s)) * iteration_s
    periods = (interval * iteration_s + stall_s) / mtbf_s
    return late_s / mtbf_s + periods + math.log(-math.expm1(-periods)) - math.log(interval)


class Gemini(DenseCycles):
    """Dense checkpoints in memory, at a fixed `interval` or by one of `config.INTERVAL_RULES`."""

    def __init__(self, interval: int | str, mtbf_s: float) -> None:
        super().__init__(None if isinstance(interval, str) else interval)
        self._rule = str(interval)
        self._mtbf_s = mtbf_s

    def demanded(self, period: int, loads: Sequence[WindowLoad]) -> int | None:
        """The best interval for the slowest rank, unless the present one is nearly as good."""
        known = [load.checkpoint_s for load in loads if load.checkpoint_s is not None]
        if len(known) < len(loads):
            return None
        iteration_s = min(load.iteration_s for load in loads)
        best = best_interval(self._rule, iteration_s, max(known), self._mtbf_s)
        return period if period / MARGIN <= best <= period * MARGIN else best
