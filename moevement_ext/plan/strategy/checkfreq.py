# SPDX-License-Identifier: Apache-2.0
"""CheckFreq: snapshot to host memory, persist to disk in the background, at a tuned frequency.

Mohan et al., FAST'21. Of a checkpoint only what the next iteration does not hide of the snapshot
holds training up; one checkpoint is persisted at a time. The interval is the shortest in which
these stalls stay within a bound, and the disk keeps up. It is profiled in the first iterations, and
grows when the stalls exceed the bound later. Only what all ranks have on disk is recovered from.
"""

import math
from collections.abc import Sequence

from moevement_ext.plan.replanning import WindowLoad
from moevement_ext.plan.strategy.dense import DenseCycles


def shortest_interval(iteration_s: float, stall_s: float, persist_s: float, bound: float) -> int:
    """The fewest iterations from one checkpoint to the next.

    Args:
        iteration_s: seconds of an iteration without checkpoints.
        stall_s: seconds by which a checkpoint holds training up.
        persist_s: seconds of its way to disk.
        bound: share of the training time for the stalls.
    """
    hides = math.ceil(persist_s / iteration_s)
    return max(1, hides, math.ceil(stall_s / (bound * iteration_s)))


class CheckFreq(DenseCycles):
    """Dense checkpoints on disk.

    Args:
        fixed: iterations from one to the next; None: tuned.
        bound: `--sparse-ckpt-overhead-bound`.
    """

    def __init__(self, fixed: int | None, bound: float) -> None:
        super().__init__(fixed)
        self._bound = bound

    def demanded(self, period: int, loads: Sequence[WindowLoad]) -> int | None:
        """A longer interval, where the present one breaks the bound or is too short for a disk.

        Stalls and disks are those of the slowest rank, for which the others wait. That rank alone
        measures an iteration without its own stall, so the shortest iteration counts.
        """
        persisted = [load.persist_s for load in loads if load.persist_s is not None]
        if len(persisted) < len(loads):
            return None
        iteration_s = min(load.iteration_s for load in loads)
        stall_s = max(load.waited_s for load in loads)
        return max(period, shortest_interval(iteration_s, stall_s, max(persisted), self._bound))
