# SPDX-License-Identifier: Apache-2.0
"""The interface of a strategy, and the one of a job.

A strategy is pure: it uses no rank, no file and no clock. Rank 0 asks it for the next plan, from
the measurements of all ranks. Captures, windows, replicas, disk and recovery are the same for all
strategies. A job imports only the module of its own.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from moevement_ext.config import AUTO, CHECKFREQ, GEMINI, MOETION, SparseCheckpointConfig
from moevement_ext.memory.disk import directory_of
from moevement_ext.plan.replanning import Cycle, PlanParameters, WindowLoad
from moevement_ext.plan.strategy.moevement import FIRST_WINDOW, AutoWindow, Measured, MoEvement


class Strategy(Protocol):
    """Decides when which state is captured."""

    counts_tokens: bool
    """Plans depend on the load of the experts."""

    def first(self) -> PlanParameters:
        """The plan of a new job, before anything is measured."""

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """The next plan, or None to keep `present`, which was in force in the cycle of `loads`.

        Called for one cycle after another; `loads` has every rank's measurements.
        """


class LossyStrategy(Strategy, Protocol):
    """A strategy whose checkpoints keep the state of some experts from an earlier checkpoint."""

    makes_up: bool
    """After a recovery, experts that lost tokens get more capacity, where that has a limit."""

    def choose(
        self, layers: Sequence[Sequence[str]], cycle: Cycle, iteration: int, ages: Mapping[str, int]
    ) -> Collection[str]:
        """Experts that a checkpoint copies. All ranks of a stage choose alike, without messages.

        Args:
            layers: all experts of each layer of the stage.
            cycle: the plan in force.
            iteration: of the checkpoint's state.
            ages: iterations since the state in the newest copy, by expert.
        """


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
    config: SparseCheckpointConfig,
    longest: int,
    shortest: Callable[[Measured], int | None],
    cores_train: bool,
) -> Strategy:
    """The strategy of a job with host memory for W = `longest`; `shortest` as of `AutoWindow`."""
    interval = config.interval
    if config.strategy == GEMINI:
        from moevement_ext.plan.strategy.dense import gemini

        return gemini(1 if interval == AUTO else interval, config.mtbf or math.inf)
    if config.strategy == CHECKFREQ:
        from moevement_ext.plan.strategy.dense import checkfreq

        return checkfreq(None if isinstance(interval, str) else interval)
    if config.lossy:
        return lossy_strategy(config)
    auto = AutoWindow(shortest, longest) if config.window == AUTO else None
    return MoEvement(
        config.order,
        longest,
        auto,
        config.reorder_change,
        config.reorder_fraction,
        first=1 if cores_train else FIRST_WINDOW,
    )
