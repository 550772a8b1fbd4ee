# SPDX-License-Identifier: Apache-2.0
"""Laws of expert placement, maximum rank overlap against every other one; survival."""

from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.simulate import placement as placements
from tools.simulate.placement import (
    allocate_replicas,
    maximum_rank_overlap,
    recovery_probability,
    spread,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Replicas, nodes and slots, where the replicas fit into the slots."""
    nodes, slots = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, nodes * slots))
    tokens = draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts))
    least = draw(st.integers(1, nodes * slots // experts))
    return allocate_replicas(tokens, nodes, slots, least), nodes, slots


def best_survival(replicas: Sequence[int], nodes: int, slots: int, failed: int) -> float:
    """Highest recovery probability of any placement, by trying every set of nodes per expert.

    More than one replica on a node is as good as one, so sets of nodes are enough.
    """
    lost = [sum(1 << node for node in chosen) for chosen in combinations(range(nodes), failed)]
    choices = [
        [nodes_of for nodes_of in range(1, 1 << nodes) if nodes_of.bit_count() <= count]
        for count in replicas
    ]
    best = 0.0
    for chosen in product(*choices):
        if all(sum(held >> node & 1 for held in chosen) <= slots for node in range(nodes)):
            kept = sum(all(held & ~gone for held in chosen) for gone in lost)
            best = max(best, kept / len(lost))
    return best


def small_cases(nodes: int, slots: int, experts: int) -> list[tuple[int, ...]]:
    """Every way to give out slots, some of which may stay free."""
    counts = combinations_with_replacement(range(1, nodes + 1), experts)
    return [replicas for replicas in counts if sum(replicas) <= nodes * slots]


@given(cases(), st.data())
def test_recovery_probability_is_that_of_plain_enumeration(
    case: tuple[list[int], int, int], data: st.DataObject
) -> None:
    replicas, nodes, slots = case
    failed = data.draw(st.integers(0, nodes))
    placement = spread(replicas, nodes, slots, seed=data.draw(st.integers(0, 9)))
    sets = list(combinations(range(nodes), failed))
    kept = sum(
        {expert for node in set(range(nodes)) - set(gone) for expert in placement[node]}
        == set(range(len(replicas)))
        for gone in sets
    )
    assert recovery_probability(placement, failed) == kept / len(sets)


@pytest.mark.parametrize(
    ('nodes', 'slots', 'experts'), [(4, 2, 3), (3, 2, 4), (3, 3, 4), (5, 1, 3)]
)
def test_placement_is_optimal_where_the_representatives_fit(
    nodes: int, slots: int, experts: int
) -> None:
    fitting = [
        replicas
        for replicas in small_cases(nodes, slots, experts)
        if sum(sorted(replicas)[::slots]) <= nodes
    ]
    assert fitting
    for replicas in fitting:
        placement = maximum_rank_overlap(replicas, nodes, slots)
        for failed in range(nodes + 1):
            best = best_survival(replicas, nodes, slots, failed)
            assert recovery_probability(placement, failed) == pytest.approx(best), replicas


def test_not_optimal_where_they_do_not_fit() -> None:
    replicas = (2, 3, 3)
    assert sum(sorted(replicas)[::2]) > 4
    overlap = maximum_rank_overlap(replicas, 4, 2)
    assert recovery_probability(overlap, 2) == pytest.approx(4 / 6)
    assert best_survival(replicas, 4, 2, 2) == pytest.approx(5 / 6)
    assert recovery_probability([(0, 1), (0, 2), (1, 2), (1, 2)], 2) == pytest.approx(5 / 6)


def test_allocation_meets_a_case_done_by_hand() -> None:
    # 100/1000 of 14 is 1, raised to 2; 200/900 of 12 is 2; 300/700 of 10 is 4; the rest is 6.
    assert allocate_replicas([300, 100, 400, 200], 7, 2, 2) == [4, 2, 6, 2]


def test_sampling_agrees_with_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(node, (node - 1) % 12) for node in range(12)]  # an expert on two nodes next to it
    exact = recovery_probability(pairs, 3)
    monkeypatch.setattr(placements, 'ENUMERATION_LIMIT', 10)
    estimate = recovery_probability(pairs, 3)
    assert estimate != exact
    assert estimate == pytest.approx(exact, abs=0.02)
    assert estimate == recovery_probability(pairs, 3)
