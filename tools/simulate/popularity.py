# SPDX-License-Identifier: Apache-2.0
"""How unevenly tokens spread over experts, and what that does to a conversion (paper, appendix D).

Skew is the Herfindahl index of the experts' token shares, scaled to 0 (all alike) .. 1 (one expert
has all): S = (sum p^2 - 1/E) / (1 - 1/E). Shares drawn from a symmetric Dirichlet distribution of
concentration alpha have a mean skew of 1 / (1 + alpha E).
"""

import numpy as np

from tools.simulate import fields


def skew(shares: np.ndarray) -> float:
    """S of shares that sum to 1."""
    experts = len(shares)
    if experts == 1:
        return 1.0
    return float((np.square(shares).sum() - 1 / experts) / (1 - 1 / experts))


def concentration(mean_skew: float, experts: int) -> float:
    """The alpha with a mean skew of `mean_skew`: (1/S - 1) / E; inf for 0."""
    rule = 'give a number from 0 to below 1'
    fields.require(0 <= mean_skew < 1, 'skew', mean_skew, rule)
    fields.whole('experts', experts)
    return (1 / mean_skew - 1) / experts if mean_skew else np.inf


def draw_shares(mean_skew: float, experts: int, seed: int = 0) -> np.ndarray:
    """Token shares of experts, ascending, [experts]; equal for a skew of 0."""
    alpha = concentration(mean_skew, experts)
    if np.isinf(alpha):
        return np.full(experts, 1 / experts)
    return np.sort(np.random.default_rng(seed).dirichlet(np.full(experts, alpha)))


def frozen_shares(
    shares: np.ndarray, window: int, *, by_popularity: bool, expert_work: float = 1.0
) -> tuple[float, ...]:
    """Share of the work that is frozen in each conversion iteration.

    Experts are cut into `window` slots of equal number; `by_popularity` captures the popular last,
    so that they stay frozen longest (paper, section 3.5), else the order says nothing and every
    slot has the mean. `expert_work` is the experts' share of all work; the rest counts as evenly
    spread over the slots.
    """
    fields.whole('window', window)
    fields.share('expert_work', expert_work)
    later = 1 - np.arange(1, window + 1) / window
    frozen = later
    if by_popularity:
        cumulative = np.concatenate([[0.0], np.sort(shares).cumsum()])
        ends = np.linspace(0, len(shares), window + 1)[1:]
        frozen = 1 - np.interp(ends, np.arange(len(shares) + 1), cumulative)
        frozen = expert_work * frozen + (1 - expert_work) * later
    return tuple(float(value) for value in np.clip(frozen, 0, 1))
