# SPDX-License-Identifier: Apache-2.0
"""Builds the strategy of a job; imports only the module of this strategy."""

import math
from collections.abc import Callable
from pathlib import Path

from moevement_ext.config import AUTO, CHECKFREQ, GEMINI, MOETION, SparseCheckpointConfig
from moevement_ext.memory.disk import directory_of
from moevement_ext.plan.auto_window import AutoWindow, Measured
from moevement_ext.plan.strategy.moevement import MoEvement
from moevement_ext.plan.strategy.strategy import LossyStrategy, Strategy


def disk_only(config: SparseCheckpointConfig) -> bool:
    """True if a recovery never starts from windows in host memory."""
    return config.strategy == CHECKFREQ


def only_source(config: SparseCheckpointConfig, run_id: str, rank: int) -> Path | None:
    """Directory of the only windows of a rank that a recovery starts from; None: its memory."""
    if not disk_only(config):
        return None
    assert config.disk is not None  # a rule of `config`
    return directory_of(Path(config.disk), run_id, rank)


def lossy_strategy(config: SparseCheckpointConfig) -> LossyStrategy:
    if config.strategy == MOETION:
        from moevement_ext.plan.strategy.moetion import Moetion

        return Moetion(config.network_bytes_per_s)
    from moevement_ext.plan.strategy.moc import Moc

    interval = 1 if isinstance(config.interval, str) else config.interval
    return Moc(interval, config.experts)


def strategy_of(
    config: SparseCheckpointConfig, longest: int, shortest: Callable[[Measured], int | None]
) -> Strategy:
    """The strategy of a job with host memory for W = `longest`; `shortest` as of `AutoWindow`."""
    interval = config.interval
    if config.strategy == GEMINI:
        from moevement_ext.plan.strategy.gemini import gemini

        return gemini(1 if interval == AUTO else interval, config.mtbf or math.inf)
    if config.strategy == CHECKFREQ:
        from moevement_ext.plan.strategy.checkfreq import checkfreq

        return checkfreq(None if isinstance(interval, str) else interval)
    if config.lossy:
        return lossy_strategy(config)
    auto = AutoWindow(shortest, longest) if config.window == AUTO else None
    return MoEvement(config.order, longest, auto, config.reorder_change, config.reorder_fraction)
