# SPDX-License-Identifier: Apache-2.0
"""The tokens lost where only some experts are saved."""

import numpy as np
import pytest

from tools.simulate.experts import lost_by_checkpoint


def test_losses_match_a_hand_calculation() -> None:
    """Three experts in turn: the one of last time has lost nothing, that before one checkpoint."""
    shares = np.array([0.1, 0.2, 0.7])
    losses = lost_by_checkpoint(shares, 1, 'sequential')
    assert losses[:3] == pytest.approx([2 * 0.2 + 0.7, 2 * 0.7 + 0.1, 2 * 0.1 + 0.2])
    assert losses == pytest.approx(np.tile(losses[:3], len(losses) // 3))
    # Of the unsaved, 0.7 is always most: it is saved each time but when another has waited long.
    assert lost_by_checkpoint(shares, 1, 'load-aware').mean() < losses.mean() == pytest.approx(1)
