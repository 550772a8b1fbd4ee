# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts follow their tokens, and their placement loses few experts with a node."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.config import ConfigurationError
from moevement_ext.plan.expert_placement import (
    allocate,
    feasible,
    maximum_rank_overlap,
    moves,
    place,
)


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[float], int, int, int]:
    """Tokens of experts, nodes, slots that suffice, replicas at least."""
    tokens = draw(st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=12))
    nodes = draw(st.integers(1, 8))
    slots = draw(st.integers(-(-len(tokens) // nodes), 6 + len(tokens) // nodes))
    return tokens, nodes, slots, draw(st.integers(1, 4))


def new_experts(placement: Any, before: Any) -> int:
    return sum(len({*row} - {*old}) for row, old in zip(placement, before, strict=True))


@given(layers())
def test_replicas_follow_the_tokens_and_fill_the_slots(layer: Any) -> None:
    tokens, nodes, slots, least = layer
    least = feasible(len(tokens), nodes, slots, least)
    replicas = allocate(tokens, nodes * slots, least)
    assert sum(replicas) == nodes * slots and min(replicas) >= least
    by_tokens = sorted(zip(tokens, replicas, strict=True))
    assert [one for _, one in by_tokens] == sorted(replicas)


@pytest.mark.parametrize(
    ('layer', 'found'),
    [
        ((16, 10, 6, 2), 2),
        ((16, 5, 6, 2), 1),  # section 6.2 of the paper: 30 slots for 16 experts
        ((4, 3, 2, 2), 1),
        ((2, 2, 4, 3), 2),  # no node needs an expert twice
    ],
)
def test_few_slots_lower_the_number_of_replicas(layer: Any, found: int) -> None:
    assert feasible(*layer) == found


def test_fewer_slots_than_experts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'6 slots \(3 x 2\) must be .* 8 experts .* to 3'):
        feasible(8, 3, 2, 1)


@given(layers())
def test_every_expert_is_on_enough_nodes(layer: Any) -> None:
    tokens, nodes, slots, least = layer
    placement = place(*layer)
    assert [len(row) for row in placement] == [slots] * nodes
    found = feasible(len(tokens), nodes, slots, least)
    holders = Counter(expert for row in placement for expert in {*row})
    assert {*holders} == {*range(len(tokens))}
    assert min(holders.values()) >= found


@given(layers())
def test_experts_of_a_group_share_the_nodes_of_its_first(layer: Any) -> None:
    tokens, nodes, slots, least = layer
    least = feasible(len(tokens), nodes, slots, least)
    replicas = allocate(tokens, nodes * slots, least)
    rows = maximum_rank_overlap(replicas, nodes, slots)
    order = sorted(range(len(tokens)), key=replicas.__getitem__)
    groups = [order[at : at + slots] for at in range(0, len(order), slots)]
    if sum(replicas[group[0]] for group in groups) <= nodes:
        for first, *others in groups:
            holders = {node for node, row in enumerate(rows) if first in row}
            assert len(holders) == replicas[first]
            assert all(one in rows[node] for node in holders for one in others)


@given(layers(), st.randoms(use_true_random=False))
def test_no_expert_is_new_if_the_tokens_stay(layer: Any, random: Random) -> None:
    before = place(*layer)
    random.shuffle(before)
    placement = place(*layer, before)
    assert new_experts(placement, before) == 0
    assert sorted(map(sorted, placement)) == sorted(map(sorted, place(*layer)))


@pytest.mark.parametrize('seed', range(5))
def test_few_experts_are_new_and_others_keep_their_slots(seed: int) -> None:
    random = Random(seed)
    tokens = [random.paretovariate(1) for _ in range(16)]
    before = place(tokens, 10, 6, 2)
    later = [one * random.uniform(0.3, 3) for one in tokens]
    placement, anywhere = place(later, 10, 6, 2, before), place(later, 10, 6, 2)
    for _ in range(10):
        random.shuffle(anywhere)
        assert new_experts(placement, before) < new_experts(anywhere, before)
    for row, old in zip(placement, before, strict=True):
        stay = Counter(row) & Counter(old)
        assert sum(a == b for a, b in zip(row, old, strict=True)) >= stay.total()


@given(layers(), st.data())
def test_moves_fill_the_slots_that_change_from_holders(layer: Any, data: Any) -> None:
    tokens, *fields = layer
    before = place(*layer)
    after = place(data.draw(st.permutations(tokens)), *fields, before)
    found = moves(before, after)
    slots = [[*row] for row in before]
    for move in found:
        assert move.expert in before[move.source]
        assert move.source == move.target or move.expert not in before[move.target]
        for slot in move.slots:
            slots[move.target][slot] = move.expert
    assert slots == [[*row] for row in after]
    sends = [move for move in found if move.source != move.target]
    assert len(sends) == new_experts(after, before)


def test_holders_send_an_expert_in_turn() -> None:
    found = moves([(0, 1), (0, 1), (2, 2), (2, 2)], [(0, 1), (0, 1), (0, 2), (0, 0)])
    assert found == [(0, 0, 2, [0]), (0, 1, 3, [0, 1])]
