# SPDX-License-Identifier: Apache-2.0
"""MoC-System: a checkpoint has K of the N experts of each layer, and all other operators.

Cai et al., ASPLOS'25 (arXiv 2408.04307). The other experts keep their state of an earlier
checkpoint. After a failure all stages roll back to the newest checkpoint, and updates of those
experts since their last copy are lost. K may double when too many tokens were lost at the present
K.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from moevement_ext.config import DYNAMIC, LOAD
from moevement_ext.plan.popularity import at_risk, moved, shares_of
from moevement_ext.plan.replanning import PlanParameters, WindowLoad
from moevement_ext.plan.strategy.cycle import Cycle

_FIRST_DYNAMIC = 1
# Thresholds for a change of shares, as by default for MoEvement's order.
_CHANGE, _FRACTION = 0.1, 0.25


def in_turn(layers: Sequence[Sequence[str]], most: int, checkpoint: int) -> set[str]:
    """K (`most`) experts of each layer in round-robin order over checkpoints, shifted by layer."""
    return {
        experts[(layer + checkpoint * most + index) % len(experts)]
        for layer, experts in enumerate(layers)
        for index in range(min(most, len(experts)))
    }


def most_unsaved(
    layers: Sequence[Sequence[str]], most: int, unsaved: Mapping[str, float]
) -> set[str]:
    """The K experts of each layer with the most tokens since their copy; ties go to the first."""
    return {
        name
        for experts in layers
        for name in sorted(experts, key=lambda name: -unsaved[name])[:most]
    }


def resumed(present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters:
    """The plan with the K of an earlier start of the job, if that was greater.

    After a restart of all workers K is back at its first value, but the lost tokens are not.
    """
    experts, lost = max(load.restored for load in loads)
    if experts <= present.experts:
        return present
    return msgspec.structs.replace(present, experts=experts, lost=lost)


def doubled(present: PlanParameters, share: float, limit: float, most: int) -> PlanParameters:
    """The plan with twice the K, at most `most`, if too many tokens were lost at the present K.

    `share` is lost tokens as a share of all tokens of the training, `limit` its maximum at one
    K.
    """
    if present.experts >= most or share - present.lost < limit:
        return present
    return msgspec.structs.replace(present, experts=min(2 * present.experts, most), lost=share)


class Moc:
    """Checkpoints of some experts every `interval` iterations.

    `experts` is K, or 'dynamic'; `choice` is one of `config.EXPERT_CHOICES`; `limit` is
    `--sparse-ckpt-lost-share`.
    """

    makes_up = False

    def __init__(self, interval: int, experts: int | str, choice: str, limit: float) -> None:
        self.counts_tokens = choice == LOAD
        self._interval = interval
        self._dynamic = experts == DYNAMIC
        self._first = _FIRST_DYNAMIC if isinstance(experts, str) else experts
        self._limit = limit

    def first(self) -> PlanParameters:
        """The whole state in one slot, with new copies of K experts of each layer."""
        return PlanParameters(0, 0, 1, {}, idle=self._interval - 1, experts=self._first)

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """A plan with another K or other token shares; None if neither changes."""
        chosen = present
        if self._dynamic:
            share = sum(load.lost for load in loads) / max(sum(load.expected for load in loads), 1)
            most = max(load.experts for load in loads)
            chosen = doubled(resumed(present, loads), share, self._limit, most)
        shares = shares_of(loads) if self.counts_tokens else {}
        if moved(present.shares, shares, _CHANGE, _FRACTION):
            chosen = msgspec.structs.replace(chosen, shares=shares)
        return None if chosen is present else chosen.changed(loads[0].start)

    def choose(
        self, layers: Sequence[Sequence[str]], cycle: Cycle, iteration: int, ages: Mapping[str, int]
    ) -> Collection[str]:
        """Experts for the checkpoint of `iteration`, the same on all ranks; see `LossyStrategy`."""
        checkpoint = iteration // cycle.period
        if not self.counts_tokens or not cycle.shares:
            return in_turn(layers, cycle.experts, checkpoint)
        unsaved: dict[str, float] = {}
        for experts in layers:
            unsaved |= at_risk(experts, cycle.shares, ages)
        return most_unsaved(layers, cycle.experts, unsaved)
