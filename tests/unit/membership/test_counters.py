# SPDX-License-Identifier: Apache-2.0
"""Arrivals of ranks, as a real store keeps them, and the limit of a wait for late ones."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from moevement_ext.membership import counters
from moevement_ext.membership.counters import Deadline
from tests.unit.membership.clock import Clock


@given(st.integers(1, 130).flatmap(lambda world: st.permutations(range(world))))
def test_one_arrival_is_the_last_and_most_take_one_request(order: list[int]) -> None:
    asked, store = [], HashStore()

    class Counted:
        def add(self, key: str, value: int) -> int:
            asked.append(key)
            return store.add(key, value)

    found = [counters.sign(Counted(), 'here', rank, len(order)) for rank in order]
    assert found == [False] * (len(order) - 1) + [True]
    assert len(asked) == len(order) + -(-len(order) // 16)


@given(st.lists(st.integers(0, 19), unique=True))
def test_missing_ranks_are_those_that_have_not_arrived(came: list[int]) -> None:
    store, seen = HashStore(), set[int]()
    for rank in came:
        assert counters.sign(store, 'here', rank, 20) == (len(seen) == 19)
        seen.add(rank)
        assert counters.missing(store, 'here', 20) == sorted(set(range(20)) - seen)
        assert [one for one in range(20) if counters.has_signed(store, 'here', one)] == sorted(seen)


@pytest.mark.parametrize(
    ('beats', 'over_at'),
    [
        ([{}, {}], 60),  # nothing is known of them
        ([{1: 3}, {1: 3}], 90),
        ([{1: 3, 2: 5}, {1: 4, 2: 5}], 90),  # one of them sends none
        ([{1: 3}, {1: 4}, {1: 5}, {1: 5}, {1: 5}, {1: 5}], 180),
    ],
)
def test_wait_ends_once_a_missing_rank_has_sent_no_heartbeat(
    beats: list[dict[int, int]], over_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, found = Clock(), iter(beats)
    monkeypatch.setattr(counters, 'time', clock)
    deadline = Deadline(timedelta(seconds=60), lambda: next(found))
    while not deadline.is_over():
        clock.now = max(clock.now + 1, deadline.until)
    assert clock.now == over_at
