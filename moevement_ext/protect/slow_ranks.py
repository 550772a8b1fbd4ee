# SPDX-License-Identifier: Apache-2.0
"""Names ranks that compute for longer than the others of their stage."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from moevement_ext.events import SlowRank
from moevement_ext.logger import logger_of
from moevement_ext.plan.replanning import WindowLoad

logger = logger_of(__name__)

# Times the median of the stage, above which a rank is slow, and below which it is so no more.
_SLOW = 1.2
_EVEN = 1.1
# Iterations that are compared at once, as single ones differ, and those after which a rank is slow.
_AT_ONCE = 20
_LASTING = 40
# A rank is named again once its ratio has changed by this factor.
_CHANGED = 1.25


class SlowRanks:
    """Compares the ranks' own seconds per iteration. One thread of rank 0.

    `report` is called when a rank becomes slow, when its ratio changes much, and when it is slow no
    more. The single rank of a stage has no other to be compared with.
    """

    def __init__(self, report: Callable[[SlowRank], None]) -> None:
        self._report = report
        self._own_s: dict[int, float] = defaultdict(float)
        self._iterations: Counter[int] = Counter()
        self._slow_for: Counter[int] = Counter()
        self._reported: dict[int, float] = {}

    def observe(self, loads: Sequence[WindowLoad]) -> None:
        """Take the measurements of one window of all ranks, in their order."""
        for rank, load in enumerate(loads):
            self._own_s[rank] += load.own_s
            self._iterations[rank] += load.iterations
        if min(self._iterations[rank] for rank in range(len(loads))) < _AT_ONCE:
            return
        for rank, ratio in self._ratios(loads).items():
            self._judge(rank, ratio, loads[rank].node)
        self._own_s.clear()
        self._iterations.clear()

    def _ratios(self, loads: Sequence[WindowLoad]) -> Mapping[int, float]:
        """Own seconds per iteration of each rank, by the median of its stage."""
        stages: dict[int, dict[int, float]] = defaultdict(dict)
        for rank, load in enumerate(loads):
            stages[load.stage][rank] = self._own_s[rank] / self._iterations[rank]
        return {
            rank: each_s / median_s
            for members in stages.values()
            if (median_s := statistics.median_low(members.values())) > 0
            for rank, each_s in members.items()
        }

    def _judge(self, rank: int, ratio: float, node: str) -> None:
        reported = self._reported.get(rank)
        is_slow = ratio > (_SLOW if reported is None else _EVEN)
        lasting = self._slow_for[rank] + self._iterations[rank] if is_slow else 0
        self._slow_for[rank] = lasting
        if reported is None and lasting < _LASTING:
            return
        if reported is not None and is_slow and max(ratio / reported, reported / ratio) < _CHANGED:
            return
        if is_slow:
            self._reported[rank] = ratio
        else:
            del self._reported[rank]
        how = f'has been slow for {lasting} iterations' if is_slow else 'is slow no more'
        pace = f'it computes for {ratio:.2f} times the median of its stage'
        logger.warning('rank %d on %s %s: %s', rank, node, how, pace)
        self._report(SlowRank(slow=rank, node=node, ratio=round(ratio, 3), iterations=lasting))
