# SPDX-License-Identifier: Apache-2.0
"""Order of capture by popularity, and the threshold of a new plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.plan.popularity import moved, order_by_popularity

NAMES = [f'op{index}' for index in range(8)]


def test_popular_experts_and_then_other_operators_come_last():
    names = ['embedding', 'expert0', 'router', 'expert1', 'expert2']
    popularity = {'expert0': 0.5, 'expert1': 0.2, 'expert2': 0.3}
    expected = ['expert1', 'expert2', 'expert0', 'embedding', 'router']
    assert order_by_popularity(names, popularity) == expected


def test_ties_keep_the_given_order():
    assert order_by_popularity(['b', 'a', 'c'], {'a': 0.5, 'b': 0.5, 'c': 0.1}) == ['c', 'b', 'a']


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


def test_thresholds_are_more_than_and_at_least():
    old, new = {'a': 1.0, 'b': 1.0}, {'a': 1.5, 'b': 1.0}
    assert not moved(old, new, change=0.5, fraction=0.5)
    assert moved(old, new, change=0.25, fraction=0.5)
    assert not moved(old, new, change=0.25, fraction=0.75)
    assert moved({}, new, change=0.25, fraction=1.0), 'shares grew from 0'
