# SPDX-License-Identifier: Apache-2.0
"""Chooses the strategy that a job is configured for."""

from collections.abc import Callable

from moevement_ext.config import AUTO, SparseCheckpointConfig
from moevement_ext.plan.auto_window import AutoWindow, Measured
from moevement_ext.strategy.moevement import MoEvement
from moevement_ext.strategy.strategy import Strategy


def strategy_of(
    config: SparseCheckpointConfig, longest: int, shortest: Callable[[Measured], int | None]
) -> Strategy:
    """The strategy of a job.

    Args:
        config: settings.
        longest: the W for which host memory is reserved.
        shortest: as of `AutoWindow`.
    """
    auto = AutoWindow(shortest, longest) if config.window == AUTO else None
    return MoEvement(config.order, longest, auto, config.reorder_change, config.reorder_fraction)
