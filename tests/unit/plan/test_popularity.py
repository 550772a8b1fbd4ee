# SPDX-License-Identifier: Apache-2.0
"""Popularity of an expert for each `--sparse-ckpt-order`, the order of capture, and new plans."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.config import CAPACITY, DECAYED, POPULARITY, SOFT
from moevement_ext.plan.popularity import Popularity, moved, order_by_popularity, sampled, shares_of
from moevement_ext.plan.replanning import PlanParameters, WindowLoad
from moevement_ext.plan.strategy.moevement import MoEvement

FIRST, SECOND = 'layer1.expert0', 'layer1.expert1'


def load(tokens: dict[str, float], capacity: float | None = None) -> WindowLoad:
    return WindowLoad(
        start=0, tokens=tokens, iteration_s=1.0, copy_bytes_per_s=1e9, capacity=capacity
    )


def test_shares_are_per_layer_and_summed_over_ranks() -> None:
    one = load({FIRST: 1, SECOND: 3, 'layer2.expert0': 5})
    two = load({FIRST: 5, SECOND: 3, 'layer2.expert1': 15})
    expected = {FIRST: 0.5, SECOND: 0.5, 'layer2.expert0': 0.25, 'layer2.expert1': 0.75}
    for order in (POPULARITY, SOFT, DECAYED, CAPACITY):
        assert Popularity(order).of([one, two], {}) == expected


def test_layer_without_counted_tokens_has_no_popularity() -> None:
    """For example, its router is in a CUDA graph."""
    seen = load({FIRST: 0, SECOND: 0, 'layer2.expert0': 5}, capacity=10)
    assert shares_of([seen]) == {'layer2.expert0': 1.0}
    assert Popularity(CAPACITY).of([seen], {}) == {'layer2.expert0': 0.5}


def test_decayed_popularity_averages_over_windows() -> None:
    """It starts with the plan in force; one window of other tokens does not reverse the order."""
    popularity = Popularity(DECAYED)
    usual, other = load({FIRST: 3, SECOND: 1}), load({FIRST: 0, SECOND: 4})
    assert popularity.of([usual], {FIRST: 0.25, SECOND: 0.75}) == {FIRST: 0.5, SECOND: 0.5}
    assert popularity.of([usual], {}) == {FIRST: 0.625, SECOND: 0.375}
    assert popularity.of([other], {}) == {FIRST: 0.3125, SECOND: 0.6875}


def test_capacity_popularity_is_capped_by_the_capacity_of_each_rank() -> None:
    one = load({FIRST: 30, SECOND: 10}, capacity=20)
    two = load({FIRST: 30, SECOND: 35}, capacity=30)
    elsewhere = load({'layer2.expert0': 1, 'layer2.expert1': 3}, capacity=4)
    assert Popularity(CAPACITY).of([one, two, elsewhere], {}) == {
        FIRST: 1.0,
        SECOND: pytest.approx(0.9),
        'layer2.expert0': 0.25,
        'layer2.expert1': 0.75,
    }


def test_few_members_of_a_stage_publish_counts() -> None:
    """Rank 0 reads what all of them publish: it must not grow with the job."""
    assert list(sampled(range(3, 8))) == [3, 4, 5, 6, 7]
    assert list(sampled(range(0, 8))) == [*range(8)]
    for members in (range(9), range(0, 4096, 2), range(1000)):
        assert 4 < len(sampled(members)) <= 8 and sampled(members)[-1] >= members[-1] // 2


# ---- the order of capture, and the threshold of a new plan

NAMES = [f'op{index}' for index in range(8)]


@given(
    st.permutations(NAMES),
    st.dictionaries(st.sampled_from([*NAMES, 'elsewhere']), st.integers(0, 3).map(float)),
)
def test_order_is_a_stable_sort_of_the_names(names, popularity):
    ordered = order_by_popularity(names, popularity)
    assert sorted(ordered) == sorted(names)
    keys = [(popularity.get(name, float('inf')), names.index(name)) for name in ordered]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    'old, new, expected',
    [
        ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], False),
        ([0.4, 0.4, 0.1, 0.1], [0.4, 0.38, 0.1, 0.12], True),
        ([0.4, 0.4, 0.1, 0.1], [0.41, 0.39, 0.1, 0.1], False),
        ([0.5, 0.5, 0.0, 0.0], [0.49, 0.5, 0.01, 0.0], True),
        ([0.5, 0.5, 0.0, 0.0, 0.0], [0.49, 0.5, 0.01, 0.0, 0.0], False),
        ([], [], False),
    ],
)
def test_experts_beyond_the_threshold_are_counted(old, new, expected):
    old, new = (dict(zip(NAMES, shares, strict=False)) for shares in (old, new))
    assert moved(old, new, change=0.1, fraction=0.25) is expected


BALANCED = {f'layer1.expert{expert}': 25.0 for expert in range(4)}


def seen_at(start: int, tokens: dict[str, float], iteration_s: float = 1.0) -> WindowLoad:
    return WindowLoad(start=start, tokens=tokens, iteration_s=iteration_s, copy_bytes_per_s=1e9)


of_default = partial(MoEvement, POPULARITY, 3, change=0.1, fraction=0.25)
fixed = of_default(None).next


@pytest.mark.parametrize(
    ('tokens', 'replanned'),
    [
        ([25, 25, 25, 25], False),
        ([27, 23, 25, 25], False),  # two experts changed by 8 %
        ([29, 25, 23, 23], True),  # one of four changed by more than 10 %
    ],
)
def test_large_popularity_changes_cause_a_new_plan(tokens: list[int], replanned: bool) -> None:
    present = PlanParameters(version=1, window=3, shares=shares_of([seen_at(0, BALANCED)]))
    seen = seen_at(6, dict(zip(BALANCED, tokens, strict=True)))
    chosen = fixed(present, [seen])
    assert (chosen is not None) is replanned
    if chosen is not None:
        assert chosen.version == 2 and chosen.window == 3
        assert chosen.origin > seen.start and (chosen.origin - seen.start) % present.window == 0
        assert chosen.shares == shares_of([seen])


def test_auto_window_changes_the_window_and_keeps_the_order() -> None:
    present = PlanParameters(version=1, window=2, shares=shares_of([seen_at(0, BALANCED)]))
    asked = []

    def auto(plan: PlanParameters, loads: Sequence[WindowLoad]) -> int:
        asked.append((plan, loads))
        return 5

    loads = [seen_at(4, BALANCED)]
    chosen = of_default(auto).next(present, loads)
    assert asked == [(present, loads)]
    assert chosen == PlanParameters(version=2, origin=10, window=5, shares=present.shares)
