# SPDX-License-Identifier: Apache-2.0
"""The byte planner: cuts an ordered list of operators into the slots of a window.

A window is W consecutive iterations, one slot each. In its slot an operator is captured in full
(master weights and optimizer moments); every earlier slot has only its compute weights (paper,
section 3.2). So the operators [a, b) make a slot of

    sum of full over [a, b)  +  sum of weights over [b, n)          bytes, on each rank.

This size grows with b and shrinks with a, hence filling each slot as far as the budget allows gives
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

type Operators = Sequence[OperatorBytes] | OperatorTable
"""Operators of a stage group, in capture order."""

Budget = int | Sequence[int]
"""Maximum bytes of a slot: one value for all ranks, or one per rank."""

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


class OperatorBytes(msgspec.Struct, frozen=True):
    """Size of one operator on each rank of the stage group (0 on ranks without it).

    Raises `ValueError` unless 0 <= weights <= full on each rank.
    """

    name: str
    full: tuple[int, ...]
    """Bytes of master weights and optimizer moments, one entry per rank."""
    weights: tuple[int, ...]
    """Bytes of compute weights, one entry per rank."""

    def __post_init__(self) -> None:
        if len(self.full) != len(self.weights):
            raise ValueError(
                f'operator {self.name!r} has full sizes for {len(self.full)} ranks but weight '
                f'sizes for {len(self.weights)}; give one of each per rank of the stage group'
            )
        for rank, (full, weights) in enumerate(zip(self.full, self.weights, strict=True)):
            if not 0 <= weights <= full:
                raise ValueError(
                    f'operator {self.name!r} has {full} bytes in full and {weights} of weights on '
                    f'rank {rank}; 0 <= weights <= full must hold'
                )


@dataclass(frozen=True, eq=False)
class OperatorTable:
    """Sizes of many operators on many ranks, for vectorized arithmetic."""

    names: list[str]
    full: np.ndarray
    """Bytes of master weights and optimizer moments, int64, shape [operators, ranks]."""
    weights: np.ndarray
    """Bytes of compute weights, same shape, never larger than `full`."""

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, operators: Operators) -> 'OperatorTable':
        """Build a table from operators; returns a table unchanged.

        Raises `ValueError` for a duplicate operator, or different numbers of ranks.
        """
        if isinstance(operators, OperatorTable):
            return operators
        shape = (len(operators), _rank_count(operators))
        full = np.array([operator.full for operator in operators], dtype=np.int64).reshape(shape)
        weights = np.array([operator.weights for operator in operators], dtype=np.int64).reshape(
            shape
        )
        return cls([operator.name for operator in operators], full, weights)


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
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f'operators captured in full more than once in a window: {twice}')

    @property
    def window(self) -> int:
        """W: iterations in a window."""
        return len(self.slots)

    def slot_of(self) -> dict[str, int]:
        return {name: index for index, slot in enumerate(self.slots) for name in slot}

    def slot_bytes(self, operators: Operators) -> tuple[tuple[int, ...], ...]:
        """Bytes captured in each slot on each rank, shape (window, ranks).

        Raises `ValueError` if `operators` are not the operators of this plan.
        """
        table = OperatorTable.of(operators)
        places = {name: place for place, name in enumerate(table.names)}
        if places.keys() != self.slot_of().keys():
            raise ValueError('slot_bytes needs exactly the operators the plan was made for')
        order = [places[name] for slot in self.slots for name in slot]
        totals = _Totals(table.full[order], table.weights[order])
        ends = np.cumsum([0, *map(len, self.slots)])
        return tuple(tuple(totals.slot(start, end).tolist()) for start, end in pairwise(ends))


class _Totals:
    """Prefix sums over the ordered operators, which price any slot in O(ranks)."""

    def __init__(self, full: np.ndarray, weights: np.ndarray) -> None:
        self.count, self.ranks = full.shape
        before = np.zeros((1, self.ranks), dtype=np.int64)
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


class _Loads:
    """Loads of a slot: bytes of a rank relative to its budget, scaled to the largest budget."""

    def __init__(self, totals: _Totals, budgets: Sequence[int]) -> None:
        self._totals = totals
        self._budgets = budgets
        self._reference = max(budgets, default=1)
        self.least = self._of(totals.alone().max(axis=0, initial=0))
        """The largest operator, alone in its slot."""
        self.most = self._of(totals.slot(0, totals.count))
        """Everything in one slot."""

    def filled(self, load: int, slots: int) -> list[int]:
        """End of each slot, all filled up to `load` >= `least`; at most `slots` + 1 slots."""
        shares = (min(load * own // self._reference, _UNLIMITED) for own in self._budgets)
        return _fill(self._totals, np.fromiter(shares, np.int64, len(self._budgets)), slots)

    def smallest(self, window: int, most: int) -> int:
        """The smallest sufficient load of `window` slots, given that `most` suffices."""
        smallest = self.least
        while smallest < most:  # `bisect` is limited to 64 bits
            middle = (smallest + most) // 2
            fits = len(self.filled(middle, window)) <= window
            smallest, most = (smallest, middle) if fits else (middle + 1, most)
        return smallest

    def _of(self, sizes: np.ndarray) -> int:
        """Largest load over the ranks, rounded up to a byte."""
        loads = (
            -(-size * self._reference // own)
            for size, own in zip(sizes.tolist(), self._budgets, strict=True)
        )
        return max(loads, default=0)


def fewest_slots(operators: Operators, budget: Budget) -> WindowPlan:
    """The shortest window, in the given order, with no slot over budget on any rank.

    Among the plans of that length, returns one with the smallest largest slot (see `balanced`).
    Raises `InfeasiblePlan` if one operator alone exceeds the budget.
    """
    table = OperatorTable.of(operators)
    totals = _Totals(table.full, table.weights)
    budgets = _budget_per_rank(budget, totals.ranks)
    caps = np.array(budgets, dtype=np.int64)
    over = np.argwhere(totals.alone() > caps)
    if len(over):
        index, rank = (int(position) for position in over[0])
        needed = int(totals.alone()[index, rank])
        raise InfeasiblePlan(table.names[index], rank, needed, budgets[rank])
    return balanced(table, max(1, len(_fill(totals, caps, len(table)))), budget)


def balanced(operators: Operators, window: int, budget: Budget | None = None) -> WindowPlan:
    """A plan of exactly `window` slots, in the given order, with the smallest largest slot.

    The largest slot is taken over slots and ranks. With a budget per rank, a rank's bytes count
    relative to its budget, scaled to the largest budget and rounded up to a byte. The budget is a
    weight here, not a limit: see `bytes_over_budget`. Trailing slots are empty if fewer slots
    suffice or there are fewer operators than slots.
    """
    if window < 1:
        raise ValueError(f'window is {window}; a window has at least one slot')
    table = OperatorTable.of(operators)
    totals = _Totals(table.full, table.weights)
    loads = _Loads(totals, _budget_per_rank(1 if budget is None else budget, totals.ranks))
    ends = loads.filled(loads.smallest(window, loads.most), window)
    filled = [tuple(table.names[start:end]) for start, end in pairwise([0, *ends])]
    return WindowPlan(tuple(filled + [()] * (window - len(filled))))


def plan_stages(
    stages: Sequence[Operators],
    *,
    window: int | None,
    budget: int | Sequence[Budget],
) -> list[WindowPlan]:
    """One plan per pipeline stage; all stages share the window, as one iteration has one slot.

    `budget` is one number, or one entry per stage (a number or one per rank of its group). With
    `window` None, W is the shortest within budget on every stage; InfeasiblePlan, with a note of
    the stage, if there is none. A given `window` may exceed the budget: check `bytes_over_budget`.
    """
    budgets = [budget] * len(stages) if isinstance(budget, int) else list(budget)
    if len(budgets) != len(stages):
        raise ValueError(f'{len(budgets)} budgets for {len(stages)} stages; give one per stage')
    if window is None:
        numbered = enumerate(zip(stages, budgets, strict=True))
        window = max((_fewest_of_stage(index, *stage) for index, stage in numbered), default=1)
    return [
        balanced(operators, window, own) for operators, own in zip(stages, budgets, strict=True)
    ]


def bytes_over_budget(plan: WindowPlan, operators: Operators, budget: Budget) -> int:
    """Maximum bytes by which a slot exceeds a rank's budget; 0 if the plan is within budget.

    Divided by the bytes per second of the budget, this is the stall of the worst iteration.
    """
    sizes = plan.slot_bytes(operators)
    over = (
        size - own
        for slot in sizes
        for size, own in zip(slot, _budget_per_rank(budget, len(slot)), strict=True)
    )
    return max(0, max(over, default=0))


def hideable_budget(
    copy_bytes_per_s: float,
    iteration_s: float,
    hidden_fraction: float = DEFAULT_HIDDEN_FRACTION,
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


def window_bytes_bound(operators: Operators, window: int) -> tuple[int, ...]:
    """Upper bound of a window's bytes on each rank, for any order of the operators.

    An operator is captured in full once and weights at most `window` - 1 times. So host memory of
    this size is enough for every later order.
    """
    if window < 1:
        raise ValueError(f'window is {window}; a window has at least one slot')
    table = OperatorTable.of(operators)
    return tuple((table.full.sum(axis=0) + (window - 1) * table.weights.sum(axis=0)).tolist())


def _fill(totals: _Totals, caps: np.ndarray, slots: int) -> list[int]:
    """End of each slot when every slot takes all operators that fit under `caps` (ranks,).

    Every operator must fit alone. Stops after `slots` + 1 slots.
    """
    ends: list[int] = []
    start = 0
    while start < totals.count and len(ends) <= slots:

        def over(end: int, start: int = start) -> bool:
            return bool((totals.slot(start, end) > caps).any())

        start += bisect_left(range(start + 1, totals.count + 1), True, key=over)
        ends.append(start)
    return ends


def _fewest_of_stage(index: int, operators: Operators, budget: Budget) -> int:
    try:
        return fewest_slots(operators, budget).window
    except InfeasiblePlan as error:
        error.add_note(f'in pipeline stage {index}')
        raise


def _rank_count(operators: Sequence[OperatorBytes]) -> int:
    names = [operator.name for operator in operators]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f'operators listed more than once: {twice}')
    counts = {len(operator.full) for operator in operators}
    if len(counts) > 1:
        raise ValueError(
            f'operators have sizes for {sorted(counts)} ranks; all need one per rank of the group'
        )
    return counts.pop() if counts else 0


def _budget_per_rank(budget: Budget, ranks: int) -> list[int]:
    budgets = [budget] * ranks if isinstance(budget, int) else list(budget)
    if len(budgets) != ranks:
        raise ValueError(
            f'{len(budgets)} budgets for {ranks} ranks; give one number or one per rank'
        )
    if any(own < 1 for own in budgets):
        raise ValueError(f'budgets must be at least 1 byte per iteration, got {min(budgets)}')
    return [min(own, _UNLIMITED) for own in budgets]
