# SPDX-License-Identifier: Apache-2.0
"""Skew of the tokens over experts, and systems that save only some experts.

Skew is the Herfindahl index of the experts' token shares, scaled to 0 (all equal) .. 1 (one expert
has all tokens): S = (sum p^2 - 1/E) / (1 - 1/E). Shares drawn from a symmetric Dirichlet
distribution of concentration alpha have a mean skew of 1 / (1 + alpha E).

MoC-System (arXiv 2408.04307) saves K experts in turn ('sequential') or the experts with the most
unsaved tokens ('load-aware'). After a failure every other expert restarts from an older copy, and
the tokens that it learned from since are lost: PLT (proportion of lost tokens) is the share of the
job's tokens lost in this way, summed over the failures. Once the PLT at the present K exceeds its
limit, K doubles, up to E. Losses are counted per expert: a popular expert with an old copy loses
many tokens.

The first version of MoEvement (MoEtion, arXiv 2412.15411v1) saves in every iteration as many
experts as the iteration hides, selected by their tokens; MLT is the mean number of tokens lost per
failure, here in iterations' worth of tokens.
"""

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ..model.fields import require
from .closed_form import Dense
from .runs import Run

_CYCLES = 40


def concentration(mean_skew: float, experts: int) -> float:
    """The alpha with mean skew `mean_skew`: (1/S - 1) / E; inf for 0."""
    return (1 / mean_skew - 1) / experts if mean_skew else np.inf


def draw_shares(mean_skew: float, experts: int, seed: int = 0) -> np.ndarray:
    """Token shares of experts, ascending, [experts]; equal shares for a skew of 0."""
    alpha = concentration(mean_skew, experts)
    if np.isinf(alpha):
        return np.full(experts, 1 / experts)
    return np.sort(np.random.default_rng(seed).dirichlet(np.full(experts, alpha)))


def spread_over(shares: np.ndarray, experts: int) -> np.ndarray:
    """Token shares of another number of experts, as skewed as `shares`; ascending, [experts]."""
    cumulative = np.concatenate([[0.0], np.sort(shares).cumsum()])
    ends = np.linspace(0, len(shares), experts + 1)
    return np.diff(np.interp(ends, np.arange(len(shares) + 1), cumulative))


def frozen_shares(shares: np.ndarray, window: int, *, by_popularity: bool) -> tuple[float, ...]:
    """Share of the work that is frozen in each conversion iteration.

    Experts are divided into `window` slots of equal number; `by_popularity` captures popular
    experts last, so that they stay frozen longest (paper, section 3.5); otherwise the order is
    random and every slot has the mean share.
    """
    frozen = 1 - np.arange(1, window + 1) / window
    if by_popularity:
        frozen = 1 - spread_over(shares, window).cumsum()
    return tuple(np.clip(frozen, 0, 1).tolist())


class PartialExperts(Struct, frozen=True):
    """Which experts a checkpoint saves, and the limit of lost tokens."""

    shares: np.ndarray
    """Token shares of the experts."""
    saved: int
    """K, experts in each checkpoint, at the start."""
    selection: str = 'sequential'
    lost_budget: float | None = None
    """Limit of PLT beyond which K doubles; None: K stays."""
    expert_bytes: float = 1.0
    """The experts' share of a full checkpoint; scales the cost of a checkpoint with K."""
    hidden_s: float = 0.0
    """Seconds of a checkpoint's copy that training hides; the remainder is a stall."""

    def __post_init__(self) -> None:
        experts = len(self.shares)
        rule = f'only {experts} experts can be saved'
        require(self.saved <= experts, 'saved_experts', self.saved, rule)

    def levels(self) -> list[int]:
        levels = [self.saved]
        while self.lost_budget is not None and levels[-1] < len(self.shares):
            levels.append(min(2 * levels[-1], len(self.shares)))
        return levels

    def size(self, saved: int) -> float:
        """Size of a checkpoint of `saved` experts, relative to a full one."""
        return 1 - self.expert_bytes * (1 - saved / len(self.shares))

    def costs(self, full: Dense, saved: int) -> Dense:
        """`full` with checkpoints of `saved` experts only; of the copy an equal part is hidden."""
        size = self.size(saved)
        stall_s = max(0.0, (full.stall_s + self.hidden_s) * size - self.hidden_s)
        return replace(full, overhead_s=full.overhead_s * size, stall_s=stall_s)


def lost_by_checkpoint(shares: np.ndarray, saved: int, selection: str) -> np.ndarray:
    """Loss of a failure after each checkpoint of a long job, in turn; float64 [checkpoints].

    The sum over the experts of token share times age of the last copy in checkpoints: the tokens
    lost at one fault by MoC-System's PLT (arXiv 2408.04307), divided by the tokens of one
    checkpoint. Multiplied by the interval, the loss is in iterations' worth of tokens. In turn and
    with equal shares the mean is (E/K - 1)/2 if K divides E.
    """
    experts = len(shares)
    unsaved = np.zeros(experts)
    cycle = -(-experts // saved)
    lost = []
    for checkpoint in range(_CYCLES * cycle):
        unsaved += shares
        if selection == 'sequential':
            chosen = np.arange(checkpoint * saved, (checkpoint + 1) * saved) % experts
        else:
            chosen = np.argsort(-unsaved, kind='stable')[:saved]
        unsaved[chosen] = 0
        lost.append(unsaved.sum())
    return np.array(lost[_CYCLES // 2 * cycle :])


class PartialRun(Run):
    """Global rollback to the last checkpoint; lost tokens are counted and may double K."""

    stationary = False

    def __init__(self, full: Dense, partial: PartialExperts, histories: int, job_s: float) -> None:
        super().__init__(full, histories)
        self.budget, self.job_iterations = partial.lost_budget, job_s / full.iteration_s
        self.levels = np.array(partial.levels())
        self.periods_s = np.array(
            [partial.costs(full, saved).unit_s for saved in self.levels.tolist()]
        )
        self.losses = [
            lost_by_checkpoint(partial.shares, saved, partial.selection) * full.period
            for saved in self.levels.tolist()
        ]
        """Iterations' worth of tokens that a failure after each checkpoint loses, by level."""
        self.level = np.zeros(histories, dtype=int)
        self.checkpoints = np.zeros(histories, dtype=np.int64)
        self.lost_at_level = np.zeros(histories)
        self.lost = np.zeros(histories)
        self.rollbacks = 0
        self.efficiency = self.useful_s / self.periods_s[self.level]

    def advance(self, running: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Keep whole periods; then load the experts' older copies."""
        periods = np.where(running, seconds, 0.0) // self.periods_s[self.level]
        kept: np.ndarray = periods * self.useful_s
        self.checkpoints += periods.astype(np.int64)
        lost = np.zeros(len(kept))
        # Without a new checkpoint, a failure loses only tokens that the previous failure lost.
        for level, losses in enumerate(self.losses):
            struck = (periods > 0) & (self.level == level)
            lost[struck] = losses[(self.checkpoints[struck] - 1) % len(losses)]
        self.lost += lost
        self.lost_at_level += lost
        self.rollbacks += int(running.sum())
        if self.budget is not None:
            over = self.lost_at_level > self.budget * self.job_iterations
            over &= self.level < len(self.levels) - 1
            self.level[over] += 1
            self.lost_at_level[over] = 0
            self.efficiency = self.useful_s / self.periods_s[self.level]
        return kept

    def plt(self) -> float:
        return float(self.lost.mean() / self.job_iterations)

    def plt_of_unlucky(self) -> float:
        """PLT that 1 history in 20 exceeds."""
        return float(np.quantile(self.lost, 0.95) / self.job_iterations)

    def mlt(self) -> float:
        return float(self.lost.sum() / max(1, self.rollbacks))

    def saved(self) -> float:
        return float(self.levels[self.level].mean())
