# SPDX-License-Identifier: Apache-2.0
"""A cycle: the iterations from one checkpoint to the next, on one pipeline stage."""

from collections.abc import Mapping

from msgspec import Struct

from moevement_ext.plan.byte_planner import WindowPlan


class Cycle(Struct, frozen=True):
    """The state that a stage captures in each iteration. Every rank captures its own part.

    Cycles begin at `origin`, `origin + period`, ... on every rank, so that a rank that receives
    a plan late joins at the next boundary. The first iterations of a cycle are its window, one
    slot each; the other, `idle` iterations capture nothing. `digest` covers the plans of all
    stages, so that windows of different plans never count as one. Of two cycles, the one with
    the higher `version` is later.
    """

    origin: int
    """Iteration whose state is the first to be captured."""
    plan: WindowPlan
    digest: str
    version: int = 0
    idle: int = 0
    experts: int = 0
    shares: Mapping[str, float] | None = None
    """Share of the layer's tokens by expert of the stage, as far as it is known."""
    lost: float = 0.0
    """Share of tokens that was lost before `experts` came into force."""

    @property
    def period(self) -> int:
        """Iterations from the start of a window to the start of the next."""
        return self.plan.window + self.idle

    def position(self, iteration: int) -> int:
        """Iterations since the cycle that captures the state after `iteration` began."""
        return (iteration - self.origin) % self.period

    def slot(self, iteration: int) -> int | None:
        """The slot for the state after `iteration`; None if it is not captured."""
        position = self.position(iteration)
        return position if iteration >= self.origin and position < self.plan.window else None
