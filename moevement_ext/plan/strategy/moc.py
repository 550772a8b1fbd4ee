# SPDX-License-Identifier: Apache-2.0
"""MoC-System: a checkpoint has K of the N experts of each layer, and all other operators.

Cai et al., ASPLOS'25 (arXiv 2408.04307). The other experts keep their state of an earlier
checkpoint. After a failure all stages roll back to the newest checkpoint, and updates of those
experts since their last copy are lost. K may double when too many tokens were lost at the present
K.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from moevement_ext.config import DYNAMIC
from moevement_ext.plan.replanning import Cycle, PlanParameters, WindowLoad

LOST_SHARE = 0.0375
"""Share of all tokens of the training, lost in recoveries at one dynamic K, that doubles it."""
_FIRST_DYNAMIC = 1


def in_turn(layers: Sequence[Sequence[str]], most: int, checkpoint: int) -> set[str]:
    """K (`most`) experts of each layer in round-robin order over checkpoints, shifted by layer."""
    return {
        experts[(layer + checkpoint * most + index) % len(experts)]
        for layer, experts in enumerate(layers)
        for index in range(min(most, len(experts)))
    }


def resumed(present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters:
    """The plan with the K of an earlier start of the job, if that was greater.

    After a restart of all workers K is back at its first value, but the lost tokens are not.
    """
    experts, lost = max(load.restored for load in loads)
    if experts <= present.experts:
        return present
    return msgspec.structs.replace(present, experts=experts, lost=lost)


def doubled(present: PlanParameters, share: float, most: int) -> PlanParameters:
    """The plan with twice the K, at most `most`, if too many tokens were lost at the present K.

    `share` is lost tokens as a share of all tokens of the training.
    """
    if present.experts >= most or share - present.lost < LOST_SHARE:
        return present
    return msgspec.structs.replace(present, experts=min(2 * present.experts, most), lost=share)


class Moc:
    """Checkpoints of some experts every `interval` iterations.

    `experts` is K, or 'dynamic'.
    """

    counts_tokens = makes_up = False

    def __init__(self, interval: int, experts: int | str) -> None:
        self._interval = interval
        self._dynamic = experts == DYNAMIC
        self._first = _FIRST_DYNAMIC if isinstance(experts, str) else experts

    def first(self) -> PlanParameters:
        """The whole state in one slot, with new copies of K experts of each layer."""
        return PlanParameters(window=1, idle=self._interval - 1, experts=self._first)

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """A plan with another K; None if it does not change."""
        if not self._dynamic:
            return None
        share = sum(load.lost for load in loads) / max(sum(load.expected for load in loads), 1)
        most = max(load.experts for load in loads)
        chosen = doubled(resumed(present, loads), share, most)
        return None if chosen is present else chosen.changed(loads[0].start)

    def choose(
        self, layers: Sequence[Sequence[str]], cycle: Cycle, iteration: int, ages: Mapping[str, int]
    ) -> Collection[str]:
        """Experts for the checkpoint of `iteration`, the same on all ranks; see `LossyStrategy`."""
        return in_turn(layers, cycle.experts, iteration // cycle.period)
