# SPDX-License-Identifier: Apache-2.0
"""Experts' popularity, and systems that save only some experts."""

import math

import numpy as np
import pytest

from tools.simulate.closed_form import Dense
from tools.simulate.experts import (
    PartialExperts,
    PartialRun,
    draw_shares,
    lost_by_checkpoint,
)
from tools.simulate.failures import Trace
from tools.simulate.monte_carlo import simulate

EVEN = np.full(64, 1 / 64)


def skew(shares: np.ndarray) -> float:
    """S by its definition."""
    experts = len(shares)
    return float((np.square(shares).sum() - 1 / experts) / (1 - 1 / experts))


@pytest.mark.parametrize('mean_skew', [0.005, 0.05, 0.2])
def test_drawn_skew_equals_the_requested_skew(mean_skew: float) -> None:
    drawn = [skew(draw_shares(mean_skew, 64, seed)) for seed in range(200)]
    assert np.mean(drawn) == pytest.approx(mean_skew, rel=0.1)


def test_losses_match_a_hand_calculation() -> None:
    """Three experts in turn: the one of last time has lost nothing, that before one checkpoint."""
    shares = np.array([0.1, 0.2, 0.7])
    losses = lost_by_checkpoint(shares, 1, 'sequential')
    assert losses[:3] == pytest.approx([2 * 0.2 + 0.7, 2 * 0.7 + 0.1, 2 * 0.1 + 0.2])
    assert losses == pytest.approx(np.tile(losses[:3], len(losses) // 3))
    # Of the unsaved, 0.7 is always most: it is saved each time but when another has waited long.
    assert lost_by_checkpoint(shares, 1, 'load-aware').mean() < losses.mean() == pytest.approx(1)


@pytest.mark.parametrize(
    ('moments', 'checkpoints', 'losses'),
    [
        ((11.0, 17.5), 8, (1.5, 1.5)),
        ((11.0, 12.5, 18.5), 8, (1.5, 1.5)),
        ((1.0, 12.0), 5, (1.5,)),
    ],
)
def test_run_counts_the_loss_of_each_failure(
    moments: tuple[float, ...], checkpoints: int, losses: tuple[float, ...]
) -> None:
    """Five checkpoints of 2 iterations, then three: experts 1 and 1 were saved last.

    A failure right after another, and one before the first checkpoint, lose no tokens for good.
    """
    shares = np.array([0.1, 0.2, 0.7])

    def make(histories: int, rng: np.random.Generator) -> PartialRun:
        return PartialRun(Dense(1.0, 2), PartialExperts(shares, 1), histories, 100.0)

    count = len(moments)
    failures = Trace(np.array(moments), np.zeros(count, dtype=int), np.full(count, math.inf), 100.0)
    run = simulate(make, failures, histories=2).run
    assert isinstance(run, PartialRun)
    assert run.lost[0] == pytest.approx(2 * sum(losses))
    assert (run.checkpoints[0], run.rollbacks) == (checkpoints, 2 * count)


def test_k_never_doubles_in_12_hours_under_the_published_rule() -> None:
    full, partial = Dense(3.0, 1, 1.0, 10.0, 600.0), PartialExperts(EVEN, 8, lost_budget=0.0375)
    run = simulate(
        lambda histories, rng: PartialRun(full, partial, histories, 12 * 3600),
        job_hours=12,
        histories=100,
    ).run
    assert isinstance(run, PartialRun) and run.saved() == 8
    # 3.5 iterations for each of the 72 failures that did not strike a restart.
    expected = 72 * math.exp(-10 / 600) * 3.5 / 14400
    assert run.plt() == pytest.approx(expected, rel=0.05)
    assert run.mlt() == pytest.approx(3.5, rel=0.02)
