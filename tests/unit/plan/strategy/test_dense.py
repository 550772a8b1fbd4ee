# SPDX-License-Identifier: Apache-2.0
"""Intervals of dense checkpoints: fixed, bounded by stalls, or chosen by failure rate."""

import math

import msgspec
import pytest

from moevement_ext.plan.replanning import PlanParameters, WindowLoad
from moevement_ext.plan.strategy.dense import (
    DenseCycles,
    best_interval,
    checkfreq,
    gemini,
    shortest_interval,
)
from tools.simulate.closed_form import Dense, optimal
from tools.simulate.profile import OperatorProfile, Profile
from tools.simulate.systems import Options, build

RANKS = 2


def load(
    stall_s: float = 0.0,
    persist_s: float | None = 0.5,
    checkpoint_s: tuple[float, float] | None = None,
) -> WindowLoad:
    """Load of a rank with iterations of one second."""
    measured = {'waited_s': stall_s, 'checkpoint_s': checkpoint_s, 'persist_s': persist_s}
    return WindowLoad(start=0, tokens={}, iteration_s=1.0, copy_bytes_per_s=1e9, **measured)


def intervals(strategy: DenseCycles, loads: list[WindowLoad]) -> list[int]:
    """The interval before each of these cycles, which all ranks measure alike."""
    present, found = strategy.first(), []
    for measured in loads:
        assert present.window == 1
        found.append(present.period)
        present = strategy.next(present, RANKS * [measured]) or present
    return [*found, present.period]


def test_fixed_interval_never_changes() -> None:
    for strategy in (checkfreq(7), gemini(7, math.inf)):
        assert strategy.first() == PlanParameters(window=1, idle=6)
        assert intervals(strategy, 5 * [load(9.0, 9.0, (9.0, 9.0))]) == 6 * [7]


@pytest.mark.parametrize(
    ('stall_s', 'persist_s', 'interval'),
    [(0.0, 0.1, 1), (0.03, 0.1, 1), (0.031, 0.1, 2), (0.3, 0.1, 10), (0.3, 40.0, 40)],
)
def test_shortest_interval_bounds_stalls_and_fits_one_persist(
    stall_s: float, persist_s: float, interval: int
) -> None:
    assert shortest_interval(1.0, stall_s, persist_s) == interval


def test_checkfreq_profiles_first_and_grows_on_a_broken_bound() -> None:
    slow, slower, hiccup = load(0.3), load(0.6), load(5.0)
    unknown = load(0.3, persist_s=None)
    strategy = checkfreq(None)
    found = intervals(strategy, [unknown, slow, slow, slow, hiccup, slow, slower, slower, load()])
    assert found == [1, 1, 1, 10, 10, 10, 10, 10, 20, 20]


def test_checkfreq_uses_the_slowest_rank() -> None:
    """The others wait for it, and measure longer iterations."""
    strategy = checkfreq(None)
    loads = [msgspec.structs.replace(load(0.0), iteration_s=1.3), load(0.3)]
    present = strategy.first()
    assert strategy.next(present, loads) is None
    changed = strategy.next(present, loads)
    assert changed is not None and changed.period == 10
    assert changed.version == 1 and changed.origin == present.after(0)


@pytest.mark.parametrize('own_s', [0.1, 0.9, 4.0])
@pytest.mark.parametrize('traffic', [1, 8])
@pytest.mark.parametrize('mtbf_s', [60.0, 3600.0])
def test_gemini_interval_is_the_best_by_closed_form(
    own_s: float, traffic: int, mtbf_s: float
) -> None:
    state = OperatorProfile('all', full_bytes=int(1e6 * own_s), weight_bytes=0)
    profile = Profile('moevement-profile/1', 1.0, (state,), 1e6, 1e6 / traffic)

    def costs(interval: int) -> Dense:
        found = build('gemini', Options(mtbf_s=mtbf_s, interval=interval), profile).costs
        assert isinstance(found, Dense)
        return found

    _, young, daly = optimal(costs(1)).values()
    best = max(range(1, 300), key=lambda interval: costs(interval).ettr_exact())
    for rule, expected in (('young', young), ('daly', daly), ('oracle', best)):
        assert best_interval(rule, 1.0, (own_s, traffic * own_s), mtbf_s) == expected


def test_gemini_amortizes_the_stall_of_its_copy() -> None:
    """A copy stalls 0.2 s at any interval, so a longer interval amortizes it."""
    assert best_interval('oracle', 1.0, (0.8, 0.8), 60.0) == 1
    assert best_interval('oracle', 1.0, (1.0, 1.0), 60.0) == 5
    assert best_interval('oracle', 1.0, (1.0, 1.0), 3600.0) > 30


def test_gemini_uses_the_slowest_rank() -> None:
    strategy = gemini('oracle', 3600.0)
    waiting = msgspec.structs.replace(load(checkpoint_s=(0.5, 0.5)), iteration_s=1.3)
    loads = [waiting, load(checkpoint_s=(0.5, 4.0))]
    assert strategy.next(strategy.first(), loads) is None
    changed = strategy.next(strategy.first(), loads)
    assert changed is not None and changed.period == 5


def test_gemini_follows_measurements_that_matter() -> None:
    strategy = gemini('oracle', 3600.0)
    unknown, slow = load(), load(checkpoint_s=(0.5, 4.0))
    nearly = load(checkpoint_s=(0.5, 4.5))
    assert best_interval('oracle', 1.0, (0.5, 4.0), 3600.0) == 5
    assert best_interval('oracle', 1.0, (0.5, 4.5), 3600.0) == 6
    assert intervals(strategy, [unknown, slow, slow, nearly, nearly, nearly]) == [1] * 3 + [5] * 4
