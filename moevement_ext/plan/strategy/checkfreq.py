# SPDX-License-Identifier: Apache-2.0
"""CheckFreq: snapshot to host memory, persist to disk in the background, at a tuned frequency.

Mohan et al., FAST'21. A checkpoint stalls training only for the part of the snapshot that the next
iteration does not hide. One checkpoint is persisted at a time. The interval is the shortest that
keeps these stalls within a bound and that the disk sustains. It is profiled in the first iterations
and grows when later stalls exceed the bound. A recovery uses only checkpoints that all ranks have
on disk.
"""

import math
from collections.abc import Sequence

from moevement_ext.plan.replanning import WindowLoad
from moevement_ext.plan.strategy.dense import DenseCycles

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
