# SPDX-License-Identifier: Apache-2.0
"""How many and which experts MoEtion saves in an iteration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import Cycle, WindowLoad
from moevement_ext.plan.strategy.moetion import Moetion, affordable, divided

MB = 1_000_000


def load(copied: float | None = 100e6, sent: float | None = 400e6, holders: int = 2) -> WindowLoad:
    """Load of a rank with all 16 experts of its stage, 5 MB each, and 20 MB of others."""
    return WindowLoad(
        start=8,
        tokens={},
        iteration_s=1.0,
        copy_bytes_per_s=copied,
        send_bytes_per_s=sent,
        experts=8,
        stage_experts=16,
        expert_bytes=80 * MB,
        other_bytes=20 * MB,
        holders=holders,
    )


@pytest.mark.parametrize(
    ('measured', 'limit', 'experts'),
    [
        (load(), None, 12),  # 80 of the 100 MB of the copy, and half of 400 MB to 2: 60 MB left
        (load(sent=240e6), None, 8),  # half of 240 MB to 2: 40 MB left
        (load(sent=240e6), 90e6, 5),  # 45 MB to each
        (load(holders=0, sent=None), None, 12),
        (load(copied=20e6), None, 1),
        (load(copied=1e12, sent=1e12), None, 16),
        (load(copied=None), None, None),
        (load(sent=None), None, None),
        (load(sent=None), 100e6, 6),
    ],
)
def test_smaller_budget_limits_the_experts(
    measured: WindowLoad, limit: float | None, experts: int | None
) -> None:
    assert affordable(measured, limit) == experts


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(1, 60),
)
def test_layers_share_the_whole_budget(layers: list[tuple[float, int]], total: int) -> None:
    risks, most = [risk for risk, _ in layers], [count for _, count in layers]
    found = divided(total, risks, most)
    assert sum(found) == min(total, sum(most))
    assert all(0 <= count <= limit for count, limit in zip(found, most, strict=True))


def test_layers_share_by_risk() -> None:
    assert divided(6, [1.0, 2.0, 3.0], [8, 8, 8]) == [1, 2, 3]
    assert divided(2, [1.0, 2.0, 3.0], [8, 8, 8]) == [0, 1, 1]
    assert divided(6, [1.0, 0.0, 9.0], [8, 8, 2]) == [4, 0, 2]
    assert divided(3, [0.0, 0.0], [8, 8]) == [2, 1]


def test_experts_with_most_tokens_since_their_copy_are_saved() -> None:
    layers = [['0.expert0', '0.expert1', '0.expert2'], ['1.expert0', '1.expert1', '1.expert2']]
    shares = dict(zip([*layers[0], *layers[1]], [0.8, 0.1, 0.1, 0.4, 0.3, 0.3], strict=True))
    cycle = Cycle(origin=0, plan=WindowPlan(((),)), digest='', experts=2, shares=shares)
    ages = dict.fromkeys(shares, 1)
    chosen = Moetion(None).choose(layers, cycle, 5, ages)
    assert chosen == {'0.expert0', '1.expert0'}
    ages |= {'0.expert1': 10, '0.expert2': 20}
    assert Moetion(None).choose(layers, cycle, 6, ages) == {'0.expert2', '0.expert1'}


@pytest.mark.parametrize('shares', [(0.9, 0.05, 0.03, 0.02), (0.6, 0.4, 0.0, 0.0)])
def test_experts_with_few_tokens_are_saved_in_time(shares: tuple[float, ...]) -> None:
    """The risk of an expert grows with the age of its copy, even without tokens in one cycle."""
    (layer,) = layers = [[f'0.expert{index}' for index in range(4)]]
    cycle = Cycle(
        origin=0,
        plan=WindowPlan(((),)),
        digest='',
        experts=1,
        shares=dict(zip(layer, shares, strict=True)),
    )
    copied = dict.fromkeys(layer, 0)
    for iteration in range(1, 1000):
        ages = {name: iteration - version for name, version in copied.items()}
        copied |= dict.fromkeys(Moetion(None).choose(layers, cycle, iteration, ages), iteration)
    assert min(copied.values()) > 500


def test_number_of_experts_follows_large_rate_changes() -> None:
    strategy = Moetion(None)
    first = strategy.first()
    assert (first.period, first.experts, strategy.counts_tokens) == (1, 1, True)
    assert strategy.next(first, [load(), load(copied=None)]) is None
    second = strategy.next(first, [load(), load(sent=240e6)])
    assert second is not None and (second.experts_of(0), second.origin) == (8, first.after(8))
    assert strategy.next(second, [load(sent=250e6), load(sent=250e6)]) is None
    third = strategy.next(second, [load(), load()])
    assert third is not None and third.experts_of(0) == 12


def test_stages_with_fewer_experts_do_not_limit_others() -> None:
    """One has only dense layers; of another, an iteration hides all two experts."""
    strategy = Moetion(None)
    dense = replace(load(), stage_experts=0, expert_bytes=0, other_bytes=500 * MB, stage=1)
    small = replace(load(), stage_experts=2, expert_bytes=10 * MB, stage=2)
    found = strategy.next(strategy.first(), [dense, load(), load(sent=240e6), small])
    assert found is not None
    assert [found.experts_of(stage) for stage in (0, 2)] == [8, 2]
    assert strategy.next(found, [dense, load(), load(sent=250e6), small]) is None
