# SPDX-License-Identifier: Apache-2.0
"""Gemini: the whole state every k iterations, in host memory of the rank and of its peers.

Wang et al., SOSP'23. The copy to own memory must end before the next update of the state, which one
iteration hides in part; traffic to peers may take the whole interval. Longer copies and traffic
stall training. A failure rolls all stages back to the newest checkpoint of which all copies are
complete.
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
