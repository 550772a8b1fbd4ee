# SPDX-License-Identifier: Apache-2.0
"""Each rank has its own heartbeats, although neighbours share a counter."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from moevement_ext.membership import counters
from moevement_ext.membership.counters import Heartbeats, hear, turn_of

WORLD = 20


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
        Heartbeats(store, 3, 6).give()
    ranks = {rank: Heartbeats(store, 3, rank) for rank in (0, 6, 7, 8, 19)}
    for rank in given:
        before = [hear(store, 3, other) for other in range(WORLD)]
        ranks[rank].give()
        after = [hear(store, 3, other) for other in range(WORLD)]
        assert [other for other in range(WORLD) if before[other] != after[other]] == [rank]
        assert [ranks[rank].heard_of(other) for other in range(WORLD)] == after


def test_ranks_of_a_counter_share_a_turn_and_other_counters_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters.time, 'monotonic', lambda: 1000.0)
    left = [turn_of(rank, 5.0) for rank in range(0, 64)]
    assert [len(set(left[at : at + 8])) for at in range(0, 64, 8)] == [1] * 8
    ends = sorted(left_s for _, left_s in left[::8])
    assert min(late - early for early, late in zip(ends, ends[1:], strict=False)) > 0.1
    assert all(0 < left_s <= 5.0 for left_s in ends)
