# SPDX-License-Identifier: Apache-2.0
"""Skew of the tokens over experts, and the tokens lost by a system that saves only some of them.

Skew is the Herfindahl index of the experts' token shares, scaled to 0 (all equal) .. 1 (one expert
has all tokens): S = (sum p^2 - 1/E) / (1 - 1/E). Shares drawn from a symmetric Dirichlet
distribution of concentration alpha have a mean skew of 1 / (1 + alpha E).

MoC-System (arXiv 2408.04307) saves K experts in turn ('sequential') or the experts with the most
unsaved tokens ('load-aware'). After a failure every other expert restarts from an older copy, and
the tokens that it learned from since are lost: PLT (proportion of lost tokens) is the share of the
job's tokens lost in this way, summed over the failures. Losses are counted per expert: a popular
expert with an old copy loses many tokens.
"""

import numpy as np

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
