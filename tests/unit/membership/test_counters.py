# SPDX-License-Identifier: Apache-2.0
"""Arrivals of ranks, as a real store keeps them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from moevement_ext.membership import counters
from moevement_ext.membership.counters import Heartbeats, read_heartbeats, turn_of


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


BEATING = 20


@pytest.fixture(scope='module')
def store() -> TCPStore:
    return TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)


@given(given=st.lists(st.sampled_from([0, 6, 7, 8, 19]), max_size=40), begun=st.integers(0, 127))
@example(given=[6, 7, 6], begun=127)
def test_heartbeat_changes_the_count_of_its_rank_only(
    store: TCPStore, given: list[int], begun: int
) -> None:
    for key in store.list_keys():
        store.delete_key(key)
    for _ in range(begun):  # so that its part of the counter eventually fills up
        Heartbeats(store, 3, 6).send()
    ranks = {rank: Heartbeats(store, 3, rank) for rank in (0, 6, 7, 8, 19)}
    for rank in given:
        before = [read_heartbeats(store, 3, other) for other in range(BEATING)]
        ranks[rank].send()
        after = [read_heartbeats(store, 3, other) for other in range(BEATING)]
        assert [other for other in range(BEATING) if before[other] != after[other]] == [rank]
        assert [ranks[rank].read(other) for other in range(BEATING)] == after


def test_ranks_of_a_counter_share_a_turn_and_other_counters_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters.time, 'monotonic', lambda: 1000.0)
    left = [turn_of(rank, 5.0) for rank in range(0, 64)]
    assert [len(set(left[at : at + 8])) for at in range(0, 64, 8)] == [1] * 8
    ends = sorted(left_s for _, left_s in left[::8])
    assert min(late - early for early, late in zip(ends, ends[1:], strict=False)) > 0.1
    assert all(0 < left_s <= 5.0 for left_s in ends)
