# SPDX-License-Identifier: Apache-2.0
"""Arrivals of ranks, as a real store keeps them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from moevement_ext.membership import counters


@given(st.integers(1, 130), st.data())
def test_ranks_without_an_arrival_are_missing(world_size: int, data: st.DataObject) -> None:
    ranks = range(world_size)
    came = data.draw(st.sets(st.sampled_from(ranks)))
    store = HashStore()
    for rank in came:
        counters.sign(store, 'here', rank, world_size)
    assert counters.missing(store, 'here', world_size) == sorted(set(ranks) - came)
    assert counters.missing(store, 'elsewhere', world_size) == list(ranks)
    assert {rank for rank in ranks if counters.has_signed(store, 'here', rank)} == came


@given(st.integers(1, 130).flatmap(lambda world: st.permutations(range(world))))
def test_one_arrival_is_the_last_and_most_take_one_request(order: list[int]) -> None:
    asked, store = [], HashStore()

    class Counted:
        def add(self, key: str, value: int) -> int:
            asked.append(key)
            return store.add(key, value)

    found = [counters.sign(Counted(), 'here', rank, len(order)) for rank in order]
    assert [one.is_last for one in found] == [False] * (len(order) - 1) + [True]
    count = -(-len(order) // 16)
    assert len(asked) == len(order) + count
    assert sum(one.order == 1 for one in found) == count


@given(st.lists(st.integers(0, 19), max_size=60), st.just(20))
def test_first_process_of_a_rank_is_identified(came: list[int], world_size: int) -> None:
    store, seen = HashStore(), set[int]()
    for rank in came:
        if came.count(rank) > 7:
            continue
        arrival = counters.sign(store, 'here', rank, world_size)
        assert arrival.is_first == (rank not in seen)
        assert arrival.is_last == (rank not in seen and len(seen) == world_size - 1)
        seen.add(rank)
        assert counters.missing(store, 'here', world_size) == sorted(set(range(20)) - seen)


@pytest.mark.parametrize('world_size', [1, 31, 32, 33, 256, 511, 512, 16384, 16500])
def test_chosen_counters_are_spread_over_all_ranks(world_size: int) -> None:
    store = HashStore()
    chosen = {
        rank // 16
        for rank in range(world_size)
        if counters.sign(store, 'here', rank, world_size).is_spread
    }
    count = -(-world_size // 16)
    assert min(count, 8) <= len(chosen) <= 15
    gaps = sorted([*chosen, count])
    assert max(b - a for a, b in zip(gaps, gaps[1:], strict=False)) <= max(count // 8, 1)
