# SPDX-License-Identifier: Apache-2.0
"""Measurements from which the next plan is decided, and the inputs that describe the plan.

A strategy decides the plan; `protect.replanner` distributes it to all ranks.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from moevement_ext.plan.byte_planner import WindowPlan

# A plan decided in window k reaches the store well before window k + 2 ends on any rank.
_WINDOWS_AHEAD = 3


class TokenCounter:
    """Counts tokens by expert, for the order of the operators; this one counts none."""

    counting = False
    """The engine sets this during the counted iterations."""
    soft = False
    """The engine sets this before training: count routers' weights instead of tokens."""

    def take(self) -> dict[str, float]:
        """Counts by expert operator since the last call; a whole iteration while counting."""
        return {}

    def make_up(self, tokens: Mapping[str, float]) -> None:
        """Make experts drop fewer tokens to make up for lost ones, if capacity has a limit."""

    def take_capacity(self) -> float | None:
        """Capacity of an expert, in tokens since the last call; None without a limit."""
        return None


class WindowLoad(Struct, frozen=True, kw_only=True):
    """Measurements of one rank in the window that began at `start`."""

    start: int
    tokens: dict[str, float]
    """Tokens (or router weights) of each expert operator in the window's first iteration; empty on
    most ranks of a large stage, see `popularity.sampled`."""
    iteration_s: float
    """Median seconds per iteration, without waits for copies."""
    copy_bytes_per_s: float | None
    """None before the first copy: a window may pass without a capture."""
    send_bytes_per_s: float | None = None
    """Send rate to holders of replicas; None before the first send."""
    capacity: float | None = None
    """Capacity of each of these experts in tokens; None without a limit."""
    cpu_bytes_per_s: float | None = None
    """Capture rate at which helper threads stay within their share of the cores; None: no limit."""
    waited_s: float = 0.0
    """Seconds by which checkpointing delayed training since the previous cycle."""
    checkpoint_s: tuple[float, float] | None = None
    """Seconds of a copy to host memory, and of the copy plus the sends to all holders; None:
    unknown."""
    persist_s: float | None = None
    """Seconds of the newest copy to disk; None before the first."""
    room: int | None = None
    """Longest W that this rank has host memory for; None: no limit beyond that of all ranks."""
    lost: float = 0.0
    """Tokens of this rank whose updates were lost, over all recoveries."""
    expected: float = 0.0
    """Tokens of this rank in the whole training, counted once per expert that receives them."""
    experts: int = 0
    """Experts per layer; a lossy strategy copies some of them."""
    stage_experts: int = 0
    """Experts of all layers of the stage."""
    expert_bytes: int = 0
    """Bytes of this rank's parts of the stage's experts."""
    other_bytes: int = 0
    """Bytes of the rest of this rank's checkpoint."""
    holders: int = 0
    """Number of peers that receive this rank's checkpoints."""
    stage: int = 0
    """Pipeline stage of this rank."""
    node: str = ''
    own_s: float = 0.0
    """Seconds of computing in `iterations`, without waits for other ranks."""
    iterations: int = 0
    """Iterations of the window that this rank computed for the first time."""
    restored: tuple[int, float] = (0, 0.0)
    """Largest `PlanParameters.experts` before the newest rollback, and the `lost` with it."""


class PlanParameters(Struct, frozen=True, kw_only=True):
    """Inputs of the plans of all stages, besides the sizes of their operators."""

    version: int = 0
    origin: int = 0
    window: int
    shares: dict[str, float] = {}
    """Popularity by expert operator; see `plan.popularity`."""
    idle: int = 0
    """Iterations without a capture after each window."""
    experts: int = 0
    """Experts of each layer (`moetion`: of a stage) in a lossy checkpoint; 0: all."""
    lost: float = 0.0
    """Share of tokens that was lost before `experts` came into force."""
    by_stage: dict[int, int] = {}
    """Number of experts by stage, which replaces `experts`."""

    @property
    def period(self) -> int:
        """Iterations from the start of a window to the start of the next."""
        return self.window + self.idle

    def experts_of(self, stage: int) -> int:
        return self.by_stage.get(stage, self.experts)

    def after(self, start: int) -> int:
        """Origin of the next plan, decided by measurements of the cycle that began at `start`."""
        return start + _WINDOWS_AHEAD * self.period

    def changed(self, start: int, **fields: Any) -> 'PlanParameters':
        """The next plan, decided by measurements of the cycle that began at `start`."""
        numbers = {'version': self.version + 1, 'origin': self.after(start)}
        return msgspec.structs.replace(self, **numbers, **fields)


class Cycle(Struct, frozen=True, kw_only=True):
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
