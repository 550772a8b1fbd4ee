# SPDX-License-Identifier: Apache-2.0
"""MoEvement: a slice of the state in every iteration, windows back to back (the paper's method)."""

from collections.abc import Callable, Sequence

from moevement_ext.config import FIXED
from moevement_ext.plan.auto_window import FIRST_WINDOW
from moevement_ext.plan.popularity import Popularity, moved
from moevement_ext.plan.replanning import PlanParameters, WindowLoad


class MoEvement:
    """Windows of W slots. W follows the link rates; experts are ordered by popularity.

    `longest` is the W for which host memory is reserved. `auto_window` computes the next W from
    the measurements, and `first` is W before them; without it, W stays `longest`. The other
    arguments are the flag `--sparse-ckpt-order`, and `reorder_change` and `reorder_fraction` of
    the configuration.
    """

    def __init__(
        self,
        order: str,
        longest: int,
        auto_window: Callable[[PlanParameters, Sequence[WindowLoad]], int] | None,
        change: float,
        fraction: float,
        first: int = FIRST_WINDOW,
    ) -> None:
        self.counts_tokens = order != FIXED
        self._popularity = Popularity(order)
        self._first = longest if auto_window is None else min(longest, first)
        self._auto_window = auto_window
        self._change, self._fraction = change, fraction

    def first(self) -> PlanParameters:
        """Windows of the fixed length, or short ones, in the order of the model."""
        return PlanParameters(window=self._first)

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """A plan with another order or W, once loads or rates have changed enough."""
        shares = self._popularity.of(loads, present.shares)
        reorder = moved(present.shares, shares, self._change, self._fraction)
        window = present.window
        if self._auto_window is not None:
            window = self._auto_window(present, loads)
        if not reorder and window == present.window:
            return None
        shares = shares if reorder else present.shares
        return present.changed(loads[0].start, window=window, shares=shares)
