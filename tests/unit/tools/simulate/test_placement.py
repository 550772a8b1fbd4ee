# SPDX-License-Identifier: Apache-2.0
"""What docs/paper.md says of Lazarus' placement of experts (Wu et al., arXiv 2407.04656).

Experts are sorted by their number of replicas and divided into groups of as many as a node has
slots; the first of a group has the fewest replicas. Each group gets as many nodes as its first
expert has replicas, with all of its experts on each node.
"""

from collections.abc import Sequence
from itertools import batched, combinations
from random import Random
from statistics import mean

import pytest

from tools.simulate.paper import PAPER


def put(expert: int, held: list[list[int]], slots: int, ties: Sequence[int]) -> None:
    """Put an expert on the emptiest node with a free slot, preferably one without the expert."""
    free = [node for node in ties if len(held[node]) < slots]
    held[min(free, key=lambda node: (expert in held[node], len(held[node])))].append(expert)


def maximum_rank_overlap(replicas: Sequence[int], nodes: int, slots: int) -> list[list[int]]:
    order = sorted(range(len(replicas)), key=lambda expert: replicas[expert])
    held: list[list[int]] = [[] for _ in range(nodes)]
    first = 0
    for group in batched(order, slots):
        last = min(nodes, first + replicas[group[0]])
        for node in held[first:last]:
            node.extend(group)
        first = last
    for expert in order:
        for _ in range(replicas[expert] - sum(node.count(expert) for node in held)):
            put(expert, held, slots, range(nodes))
    return held


def spread(replicas: Sequence[int], nodes: int, slots: int, seed: int) -> list[list[int]]:
    """Experts of each node if slots are balanced and failures ignored."""
    random = Random(seed)
    held: list[list[int]] = [[] for _ in range(nodes)]
    for expert in sorted(range(len(replicas)), key=lambda expert: -replicas[expert]):
        for _ in range(replicas[expert]):
            put(expert, held, slots, random.sample(range(nodes), nodes))
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
