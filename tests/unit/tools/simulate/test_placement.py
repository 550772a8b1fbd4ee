# SPDX-License-Identifier: Apache-2.0
"""What docs/paper.md says of Lazarus' placement of experts (Wu et al., arXiv 2407.04656)."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from statistics import mean

import pytest

from moevement_ext.plan.expert_placement import maximum_rank_overlap
from tools.simulate.paper import PAPER


def spread(replicas: Sequence[int], nodes: int, slots: int, seed: int) -> list[list[int]]:
    """Experts of each node if slots are balanced and failures ignored."""
    random = Random(seed)
    held: list[list[int]] = [[] for _ in range(nodes)]
    for expert in sorted(range(len(replicas)), key=lambda expert: -replicas[expert]):
        for _ in range(replicas[expert]):
            free = [node for node in held if len(node) < slots]
            random.shuffle(free)
            min(free, key=lambda node: (expert in node, len(node))).append(expert)
    return held


def survival(placement: Sequence[Sequence[int]], failed: int) -> float:
    """Share of the sets of `failed` nodes that leave a replica of each expert."""
    experts = set().union(*placement)
    sets = [*combinations(placement, len(placement) - failed)]
    return sum(set().union(*left) == experts for left in sets) / len(sets)


def test_claims_of_lazarus_are_compared_with_the_most_skewed_load() -> None:
    replicas = [2] * 15 + [30]
    claimed = {what: ours for source, what, _, ours, *_ in PAPER.claims if source == 'Lazarus'}
    overlap = survival(maximum_rank_overlap(replicas, 10, 6), 4)
    assert claimed['survival of 4 failures with maximum rank overlap'] == pytest.approx(overlap)
    spreads = mean(survival(spread(replicas, 10, 6, seed), 4) for seed in range(20))
    spread_out = claimed['survival of 4 failures with replicas spread out']
    assert spread_out == pytest.approx(spreads, abs=0.02)
