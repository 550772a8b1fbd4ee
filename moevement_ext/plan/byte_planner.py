# SPDX-License-Identifier: Apache-2.0
"""The byte planner: cuts an ordered list of operators into the slots of a window.

A window is W consecutive iterations, one slot each. In its slot an operator is captured in full
(master weights and optimizer moments); every earlier slot has only its compute weights (paper,
section 3.2). So the operators [a, b) make a slot of

    sum of full over [a, b)  +  sum of weights over [b, n)          bytes, on each rank.

This size grows with b and shrinks with a, so filling each slot as far as the budget allows gives
the minimum number of slots. All arithmetic is exact, on integer bytes of each rank, so ranks with
the same sizes reach the same plan. Runs on the training thread at the start, and on the replanner
thread during training.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

DEFAULT_HIDDEN_FRACTION = 0.8
"""Share of an iteration that can hide a copy: forward and backward, less a margin.

The optimizer step must wait for the copy, as it overwrites the source.
"""
# Bytes; larger than any sum of operators, and within 64 bits.
_UNLIMITED = 2**62


class InfeasiblePlan(ValueError):
    """One operator exceeds the budget, alone in its slot beside the compute weights of later ones.

    `rank` counts within the stage group. No longer window helps: capture less, or raise the
    budget.
    """

    def __init__(self, operator: str, rank: int, needed: int, budget: int) -> None:
        super().__init__(
            f'operator {operator!r} needs a slot of {needed} bytes on rank {rank} of its stage '
            f'group (its full state and the compute weights of the operators after it), the budget '
            f'is {budget} bytes per iteration; no window is long enough: raise the budget (accept '
            f'an overhead, fewer replicas, a faster link) or split the state over more ranks'
        )
        self.operator = operator
        self.rank = rank
        self.needed = needed
        self.budget = budget


@dataclass(frozen=True, eq=False)
class OperatorTable:
    """Operators of a stage group in capture order, with their bytes on each rank of the group.

    Raises `ValueError` for a duplicate operator, or unless 0 <= weights <= full.
    """

    names: Sequence[str]
    full: np.ndarray
    """Bytes of master weights and optimizer moments, int64, shape [operators, ranks]."""
    weights: np.ndarray
    """Bytes of compute weights, same shape."""

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError(f'operators listed more than once: {_twice(self.names)}')
        wrong = np.argwhere((self.weights < 0) | (self.weights > self.full))
        for operator, rank in wrong[:1].tolist():
            raise ValueError(
                f'operator {self.names[operator]!r} has {self.full[operator, rank]} bytes in full '
                f'and {self.weights[operator, rank]} of weights on rank {rank}; 0 <= weights <= '
                f'full must hold'
            )

    def __len__(self) -> int:
        return len(self.names)


class WindowPlan(msgspec.Struct, frozen=True):
    """Names of the operators captured in full in each slot of a window.

    Raises `ValueError` if there is no slot, or an operator occurs twice.
    """

    slots: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError('a window has at least one slot')
        names = [name for slot in self.slots for name in slot]
        if len(set(names)) != len(names):
            raise ValueError(
                f'operators captured in full more than once in a window: {_twice(names)}'
            )

    @property
    def window(self) -> int:
        """W: iterations in a window."""
        return len(self.slots)

    def slot_bytes(self, operators: OperatorTable) -> np.ndarray:
        """Bytes captured in each slot on each rank, int64 (window, ranks).

        Raises `ValueError` if `operators` are not the operators of this plan.
        """
        places = {name: place for place, name in enumerate(operators.names)}
        names = [name for slot in self.slots for name in slot]
        if places.keys() != set(names):
            raise ValueError('slot_bytes needs exactly the operators the plan was made for')
        order = [places[name] for name in names]
        totals = _Totals(operators.full[order], operators.weights[order])
        ends = np.cumsum([0, *map(len, self.slots)])
        return np.stack([totals.slot(start, end) for start, end in pairwise(ends)])


class _Totals:
    """Prefix sums over the ordered operators, which price any slot in O(ranks)."""

    def __init__(self, full: np.ndarray, weights: np.ndarray) -> None:
        self.count, ranks = full.shape
        before = np.zeros((1, ranks), dtype=np.int64)
        self._full = np.concatenate([before, full.cumsum(axis=0)])
        self._end = (
            self._full + weights.sum(axis=0) - np.concatenate([before, weights.cumsum(axis=0)])
        )

    def slot(self, start: int, end: int) -> np.ndarray:
        """Bytes on each rank, int64 (ranks,), of a slot with operators [start, end) in full."""
        size: np.ndarray = self._end[end] - self._full[start]
        return size

    def alone(self) -> np.ndarray:
        """Bytes of a slot with only this operator in full, int64 (operators, ranks)."""
        size: np.ndarray = self._end[1:] - self._full[:-1]
        return size

    def fill(self, cap: int, slots: int) -> list[int]:
        """End of each slot when every slot takes all operators that fit under `cap`.

        Every operator must fit alone. Stops after `slots` + 1 slots.
        """
        ends: list[int] = []
        start = 0
        while start < self.count and len(ends) <= slots:

            def over(end: int, start: int = start) -> bool:
                return bool((self.slot(start, end) > cap).any())

            start += bisect_left(range(start + 1, self.count + 1), True, key=over)
            ends.append(start)
        return ends


def fewest_slots(operators: OperatorTable, budget: int) -> WindowPlan:
    """The shortest window, in the given order, with no slot over budget on any rank.

    Among the plans of that length, returns one with the smallest largest slot (see `balanced`).
    Raises `InfeasiblePlan` if one operator alone exceeds the budget.
    """
    if budget < 1:
        raise ValueError(f'budgets must be at least 1 byte per iteration, got {budget}')
    totals = _Totals(operators.full, operators.weights)
    alone = totals.alone()
    for operator, rank in np.argwhere(alone > budget)[:1].tolist():
        raise InfeasiblePlan(operators.names[operator], rank, int(alone[operator, rank]), budget)
    return balanced(operators, max(1, len(totals.fill(budget, len(operators)))))


def balanced(operators: OperatorTable, window: int) -> WindowPlan:
    """A plan of exactly `window` slots, in the given order, with the smallest largest slot.

    The largest slot is taken over slots and ranks. Trailing slots are empty if fewer slots
    suffice or there are fewer operators than slots.
    """
    _check_window(window)
    totals = _Totals(operators.full, operators.weights)
    least = int(totals.alone().max(initial=0))
    most = int(totals.slot(0, totals.count).max(initial=0))

    def fits(cap: int) -> bool:
        return len(totals.fill(cap, window)) <= window

    smallest = least + bisect_left(range(least, most), True, key=fits)
    ends = totals.fill(smallest, window)
    filled = [tuple(operators.names[start:end]) for start, end in pairwise([0, *ends])]
    return WindowPlan(tuple(filled + [()] * (window - len(filled))))


def bytes_over_budget(plan: WindowPlan, operators: OperatorTable, budget: int) -> int:
    """Maximum bytes by which a slot exceeds the budget on a rank; 0 if the plan is within budget.

    Divided by the bytes per second of the budget, this is the stall of the worst iteration.
    """
    return max(0, int(plan.slot_bytes(operators).max(initial=0)) - budget)


def hideable_budget(
    copy_bytes_per_s: float, iteration_s: float, hidden_fraction: float = DEFAULT_HIDDEN_FRACTION
) -> int:
    """Bytes that a rank can copy to host memory in an iteration without lengthening it.

    `hidden_fraction` is the part of the iteration, in (0, 1], that can hide the copy.
    """
    if copy_bytes_per_s <= 0 or iteration_s <= 0:
        raise ValueError(
            f'the copy rate ({copy_bytes_per_s} bytes/s) and the iteration time ({iteration_s} s) '
            f'must be positive; measure them over a few iterations'
        )
    if not 0 < hidden_fraction <= 1:
        raise ValueError(f'hidden_fraction is {hidden_fraction}; it must be in (0, 1]')
    return int(min(copy_bytes_per_s * iteration_s * hidden_fraction, _UNLIMITED))


def window_bytes_bound(operators: OperatorTable, window: int) -> np.ndarray:
    """Upper bound of a window's bytes on each rank, int64 (ranks,), for any operator order.

    An operator is captured in full once and weights at most `window` - 1 times. So host memory of
    this size is enough for every later order.
    """
    _check_window(window)
    bound: np.ndarray = operators.full.sum(axis=0) + (window - 1) * operators.weights.sum(axis=0)
    return bound


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f'window is {window}; a window has at least one slot')


def _twice(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
