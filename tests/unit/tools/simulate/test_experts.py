# SPDX-License-Identifier: Apache-2.0
"""Experts' popularity, and the tokens lost where only some experts are saved."""

import numpy as np
import pytest

from tools.simulate.experts import draw_shares, lost_by_checkpoint


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
