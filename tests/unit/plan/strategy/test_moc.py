# SPDX-License-Identifier: Apache-2.0
"""Experts that a checkpoint of MoC-System takes, and when it takes more."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from moevement_ext.config import DYNAMIC
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import Cycle, PlanParameters, WindowLoad
from moevement_ext.plan.strategy.moc import Moc, doubled, in_turn
from tools.simulate.experts import lost_by_checkpoint


def layers_of(layers: int, experts: int) -> list[list[str]]:
    return [[f'{layer}.expert{index}' for index in range(experts)] for layer in range(layers)]


def by_layer(chosen: set[str], layers: int) -> list[set[int]]:
    return [
        {int(name.rpartition('expert')[2]) for name in chosen if name.startswith(f'{layer}.')}
        for layer in range(layers)
    ]


def test_turns_are_shifted_by_layer() -> None:
    layers = layers_of(2, 4)
    assert by_layer(in_turn(layers, 1, 0), 2) == [{0}, {1}]
    assert by_layer(in_turn(layers, 1, 5), 2) == [{1}, {2}]
    assert by_layer(in_turn(layers, 2, 1), 2) == [{2, 3}, {3, 0}]


@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 50))
def test_every_expert_has_a_turn_in_each_round(experts: int, most: int, first: int) -> None:
    layers = layers_of(2, experts)
    turns = -(-experts // most)
    taken = [in_turn(layers, most, first + turn) for turn in range(turns)]
    assert set().union(*taken) == {name for layer in layers for name in layer}
    assert all(len(chosen) == 2 * min(most, experts) for chosen in taken)


def lost_after_each(most: int, shares: Sequence[float], checkpoints: int) -> list[float]:
    """Tokens lost by a failure after each checkpoint, in units of a checkpoint's tokens."""
    (layer,) = layers = layers_of(1, len(shares))
    share = dict(zip(layer, shares, strict=True))
    strategy = Moc(1, most)
    cycle = Cycle(origin=0, plan=WindowPlan(((),)), digest='', experts=most, shares=share)
    copied = dict.fromkeys(layer, 0)
    found = []
    for iteration in range(1, checkpoints + 1):
        ages = {name: iteration - version for name, version in copied.items()}
        copied |= dict.fromkeys(strategy.choose(layers, cycle, iteration, ages), iteration)
        found.append(sum(share[name] * (iteration - copied[name]) for name in layer))
    return found


@pytest.mark.parametrize(('experts', 'most'), [(8, 1), (8, 2), (8, 4), (8, 8), (4, 1)])
def test_loss_of_sequential_turns_has_a_closed_form(experts: int, most: int) -> None:
    """(N/K - 1) / 2 checkpoints' worth of tokens once all have had a turn; also by skew."""
    even = [1 / experts] * experts
    losses = lost_after_each(most, even, 4 * experts)
    expected = (experts / most - 1) / 2
    assert losses[-1] == pytest.approx(expected)
    assert lost_by_checkpoint(np.array(even), most, 'sequential').mean() == pytest.approx(expected)


@pytest.mark.parametrize(
    ('share', 'before', 'experts', 'then'),
    [
        (0.0374, 0.0, 1, 1),
        (0.0375, 0.0, 1, 2),
        (0.05, 0.02, 2, 2),
        (0.06, 0.02, 2, 4),
        (0.5, 0.0, 3, 4),
        (0.5, 0.0, 4, 4),
    ],
)
def test_k_doubles_at_the_limit(share: float, before: float, experts: int, then: int) -> None:
    """Loss at an earlier K does not count again."""
    present = PlanParameters(version=3, window=1, experts=experts, lost=before)
    assert doubled(present, share, 4).experts == then


def load(lost: float, expected: float, tokens: dict[str, float] | None = None) -> WindowLoad:
    return WindowLoad(
        start=8,
        tokens=tokens or {},
        iteration_s=1.0,
        copy_bytes_per_s=1e9,
        lost=lost,
        expected=expected,
        experts=4,
    )


def test_all_ranks_change_to_the_next_k_together() -> None:
    strategy = Moc(4, DYNAMIC)
    first = strategy.first()
    assert (first.period, first.experts, strategy.counts_tokens) == (4, 1, False)
    assert strategy.next(first, [load(3, 100), load(4, 100)]) is None
    second = strategy.next(first, [load(4, 100), load(4, 100)])
    assert second == PlanParameters(
        version=1, origin=first.after(8), window=1, idle=3, experts=2, lost=0.04
    )
    assert strategy.next(second, [load(4, 100), load(4, 100)]) is None
    assert strategy.next(second, [load(4, 100), load(12, 100)]) is not None


def test_k_survives_a_restart_of_all_workers() -> None:
    """K = 4 of 8 had been reached; the losses until then are counted once."""
    strategy = Moc(1, DYNAMIC)
    restored = [replace(load(share, 100), experts=8, restored=(4, 0.09)) for share in (9, 11)]
    back = strategy.next(strategy.first(), restored)
    assert back is not None and (back.experts, back.lost) == (4, 0.09)
    assert strategy.next(back, restored) is None
    more = strategy.next(back, [replace(one, lost=13) for one in restored])
    assert more is not None and (more.experts, more.lost) == (8, 0.13)
    fixed = Moc(1, 2)
    assert fixed.next(fixed.first(), restored) is None
