# SPDX-License-Identifier: Apache-2.0
"""MoEtion, the first version: each iteration saves the experts with the most tokens to lose.

Gandhi and Kozyrakis (arXiv 2412.15411v1). Copies to host memory and sends to the holders of
replicas each have a budget: the bytes that an iteration hides. The smaller budget, less the
operators that are not experts, gives the number of saved experts of a stage, by the rank that can
save the fewest: stages may have few MoE layers, or none. Layers share it in proportion to
their risk (tokens since the copies of their experts); within a layer the experts with most tokens
come first. After a failure, experts with a capacity limit drop fewer tokens until they have
received as many additional tokens as they lost.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from moevement_ext.plan.byte_planner import DEFAULT_HIDDEN_FRACTION
from moevement_ext.plan.popularity import at_risk, moved, shares_of
from moevement_ext.plan.replanning import Cycle, PlanParameters, WindowLoad
from moevement_ext.plan.windows import DEFAULT_NETWORK_SHARE, held_to

_CHANGE, _FRACTION = 0.1, 0.25
MARGIN = 1.25
"""Factor by which a stage's number of experts must change for a new plan."""


def affordable(load: WindowLoad, limit: float | None) -> int | None:
    """Experts that a rank can save per iteration; None: unknown rate. `limit`: see `held_to`."""
    if load.copy_bytes_per_s is None:
        return None
    local = DEFAULT_HIDDEN_FRACTION * load.copy_bytes_per_s * load.iteration_s
    remote = math.inf
    if load.holders:
        sent = held_to(load.send_bytes_per_s, DEFAULT_NETWORK_SHARE, limit)
        if sent is None:
            return None
        remote = sent * load.iteration_s / load.holders
    left = min(local, remote) - load.other_bytes
    part = left / load.expert_bytes if load.expert_bytes else 1.0
    return max(1, math.floor(min(part, 1.0) * load.stage_experts))


def _by_stage(loads: Sequence[WindowLoad], limit: float | None) -> dict[int, int] | None:
    """Experts that every rank of a stage can save, by stage; None while a rate is unknown."""
    found: dict[int, int] = {}
    for load in loads:
        count = affordable(load, limit)
        if count is None:
            return None
        found[load.stage] = min(count, found.get(load.stage, count))
    return found


def divided(total: int, risks: Sequence[float], most: Sequence[int]) -> list[int]:
    """Experts of each layer, `total` together: in proportion to its risk, none above `most`.

    The rounding rest goes to the largest remainders; ties go to the first layer.
    """
    left = min(total, sum(most))
    found = [0] * len(risks)
    layers = set(range(len(risks)))
    while left:
        at_stake = sum(risks[layer] for layer in layers)
        wanted = {
            layer: left * (risks[layer] / at_stake if at_stake else 1 / len(layers))
            for layer in layers
        }
        full = {layer for layer in layers if wanted[layer] >= most[layer]}
        if not full:
            return _rounded(found, wanted, left)
        for layer in full:  # the other layers share the remainder
            found[layer] = most[layer]
        left -= sum(most[layer] for layer in full)
        layers -= full
    return found


def _rounded(found: list[int], wanted: Mapping[int, float], left: int) -> list[int]:
    for layer, count in wanted.items():
        found[layer] = math.floor(count)
    rest = left - sum(map(math.floor, wanted.values()))
    by_remainder = sorted(
        wanted, key=lambda layer: (math.floor(wanted[layer]) - wanted[layer], layer)
    )
    for layer in by_remainder[:rest]:
        found[layer] += 1
    return found


def _another(present: int, count: int) -> bool:
    return not present / MARGIN <= count <= present * MARGIN


class Moetion:
    """Checkpoints of some experts in every iteration; `limit` as in `held_to`."""

    counts_tokens = makes_up = True

    def __init__(self, limit: float | None) -> None:
        self._limit = limit

    def first(self) -> PlanParameters:
        """The whole state in one slot, with one new expert copy, until the rates are known."""
        return PlanParameters(window=1, experts=1)

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """A plan with another number of experts or token shares; None if neither changes."""
        experts = _by_stage(loads, self._limit) or {}
        if not any(_another(present.experts_of(stage), count) for stage, count in experts.items()):
            experts = present.by_stage
        shares = shares_of(loads)
        follows = moved(present.shares, shares, _CHANGE, _FRACTION)
        if experts == present.by_stage and not follows:
            return None
        shares = shares if follows else present.shares
        return present.changed(loads[0].start, shares=shares, by_stage=experts)

    def choose(
        self, layers: Sequence[Sequence[str]], cycle: Cycle, iteration: int, ages: Mapping[str, int]
    ) -> Collection[str]:
        """Experts for the checkpoint of `iteration`, the same on all ranks; see `LossyStrategy`."""
        risks = [at_risk(experts, cycle.shares or {}, ages) for experts in layers]
        totals = [sum(risk.values()) for risk in risks]
        counts = divided(cycle.experts, totals, [len(experts) for experts in layers])
        return {
            name
            for risk, count in zip(risks, counts, strict=True)
            for name in sorted(risk, key=lambda name: -risk[name])[:count]
        }
