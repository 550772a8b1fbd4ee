# SPDX-License-Identifier: Apache-2.0
"""MoEvement: a slice of the state in every iteration, windows back to back (the paper's method)."""

from collections.abc import Callable, Sequence

from moevement_ext.config import FIXED
from moevement_ext.plan.auto_window import FIRST_WINDOW
from moevement_ext.plan.popularity import Popularity
from moevement_ext.plan.replanning import PlanParameters, WindowLoad, decide_plan


class MoEvement:
    """Windows of W slots. W follows the link rates; experts are ordered by popularity.

    `longest` is the W for which host memory is reserved; without `auto_window`, W stays
    `longest`. The other arguments are the flags `--sparse-ckpt-order`,
    `--sparse-ckpt-reorder-change` and `--sparse-ckpt-reorder-fraction`.
    """

    def __init__(
        self,
        order: str,
        longest: int,
        auto_window: Callable[[PlanParameters, Sequence[WindowLoad]], int] | None,
        change: float,
        fraction: float,
    ) -> None:
        self.counts_tokens = order != FIXED
        self._popularity = Popularity(order)
        self._first = longest if auto_window is None else min(longest, FIRST_WINDOW)
        self._auto_window = auto_window
        self._change, self._fraction = change, fraction

    def first(self) -> PlanParameters:
        """Windows of the fixed length, or short ones, in the order of the model."""
        return PlanParameters(0, 0, self._first, {})

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """A plan with another order or W, once loads or rates have changed enough."""
        return decide_plan(
            present,
            loads,
            popularity=self._popularity.of,
            auto_window=self._auto_window,
            change=self._change,
            fraction=self._fraction,
        )
