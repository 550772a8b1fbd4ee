# SPDX-License-Identifier: Apache-2.0
"""The next plan of windows: by measured times at first, by popularity later.

How it gets to all ranks is the matter of `protect.replanner`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from moevement_ext.plan.ordering import changed_enough

# A plan decided in window k is in the store well before window k + 2 ends on any rank.
_WINDOWS_AHEAD = 3


class TokenCounter(Protocol):
    """Counts tokens by expert, for the order of the operators."""

    counting: bool
    """Set by the engine for the iterations that count."""
    soft: bool
    """Set by the engine before training: count the weights that routers give to tokens."""

    def take(self) -> dict[str, float]:
        """Counts by expert operator since the last call."""

    def take_capacity(self) -> float | None:
        """Tokens that an expert took at most since the last call; None: as many as there are."""


class NoTokens:
    """For a model whose experts keep the order that they are given in."""

    counting = False
    soft = False

    def take(self) -> dict[str, float]:
        """Nothing was counted."""
        return {}

    def take_capacity(self) -> float | None:
        """Nothing limits them."""
        return None


class WindowLoad(msgspec.Struct, frozen=True):
    """What one rank saw in the window that began at `start`."""

    start: int
    tokens: dict[str, float]
    """Tokens routed to each expert operator in the window's first iteration, or their weights."""
    iteration_s: float
    """Median, without waits for copies."""
    copy_bytes_per_s: float | None
    """None until something was copied: a window may pass without a capture."""
    send_bytes_per_s: float | None = None
    """To holders of replicas; None until something was sent."""
    capacity: float | None = None
    """Tokens that each of these experts took at most; None: nothing limits them."""
    cpu_bytes_per_s: float | None = None
    """Captured if helper threads take just their share of the cores; None: they have no share."""


class PlanParameters(msgspec.Struct, frozen=True):
    """All that the plans of all stages are computed from, besides the sizes of their operators."""

    version: int
    origin: int
    window: int
    shares: dict[str, float]
    """Popularity by expert operator; see `plan.popularity`."""


def decide_plan(
    present: PlanParameters,
    loads: Sequence[WindowLoad],
    *,
    popularity: Callable[[Sequence[WindowLoad], Mapping[str, float]], dict[str, float]],
    auto_window: Callable[[PlanParameters, Sequence[WindowLoad]], int] | None,
    change: float,
    fraction: float,
) -> PlanParameters | None:
    """The next plan, or None to keep the present one.

    Args:
        present: the plan in force in the observed window.
        loads: what every rank saw in that window.
        popularity: of the experts, by what was seen and the one of the present plan; without any
            the order stays.
        auto_window: the next W, by what was measured; None: W is fixed.
        change: relative change of a share that counts.
        fraction: of the experts that must have changed.
    """
    shares = popularity(loads, present.shares)
    reorder = bool(shares) and _moved(present.shares, shares, change, fraction)
    window = present.window if auto_window is None else auto_window(present, loads)
    if not reorder and window == present.window:
        return None
    return PlanParameters(
        version=present.version + 1,
        origin=loads[0].start + _WINDOWS_AHEAD * present.window,
        window=window,
        shares=shares if reorder else present.shares,
    )


def _moved(
    old: Mapping[str, float], new: Mapping[str, float], change: float, fraction: float
) -> bool:
    names = sorted(new)
    before = np.array([old.get(name, 0.0) for name in names])
    after = np.array([new[name] for name in names])
    return changed_enough(before, after, change=change, fraction=fraction)
