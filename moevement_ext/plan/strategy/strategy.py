# SPDX-License-Identifier: Apache-2.0
"""Interface of a strategy.

A strategy is pure: it uses no rank, no file and no clock. Rank 0 asks it for the next plan, from
the measurements of all ranks. `choice` names the source of a recovery. Captures, windows, replicas,
disk and recovery are the same for all strategies.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from moevement_ext.plan.replanning import PlanParameters, WindowLoad
from moevement_ext.plan.strategy.cycle import Cycle


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
