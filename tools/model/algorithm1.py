# SPDX-License-Identifier: Apache-2.0
"""The paper's Algorithm 1 as printed: a baseline for comparison, not for training.

Algorithm 1 starts with every operator active (captured in full) in slot 0 and freezes one more
until slot 0 fits, then puts that many operators in each slot. Its faults:

- It prices only slot 0, with mean sizes: one large operator, or one rank that holds more than the
  others, exceeds the budget of a slot unnoticed.
- The loop ends at two active operators, whether they fit or not, and never tries one: it cannot
  detect an infeasible budget and misses plans with one operator per slot.
- Each slot has the same number of operators, although the tail of compute weights shrinks from slot
  to slot and leaves room. With equal operators of A bytes in full and F of weights per parameter
  and a budget of b, W is (A - F) / (b - F) instead of ln(b / (b - F)) / ln(A / (A - F)), both
  rounded up: for A = 12 and F = 2, 6 instead of 5 at b = 11/3 and 20 instead of 9 at b = 2.5.
"""

from itertools import batched

from moevement_ext.plan.byte_planner import OperatorTable, WindowPlan


def plan_as_printed(operators: OperatorTable, budget: int) -> WindowPlan:
    """The window of Algorithm 1 for operators in the given order; slots may exceed the budget.

    `budget` is the bytes that can be copied in one iteration (bandwidth times iteration time).
    The paper has no ranks: the mean is over operators and ranks, so the algorithm prices the
    mean rank.
    """
    active = active_operators(operators, budget)
    return WindowPlan(tuple(batched(operators.names, active)) if active else ((),))


def active_operators(operators: OperatorTable, budget: int) -> int:
    """Number of operators that Algorithm 1 captures in full per slot."""
    total = len(operators)
    full, weights = int(operators.full.sum()), int(operators.weights.sum())
    samples = operators.full.size
    active = total
    while active > 2:
        # Both sides times `samples`, so that the mean sizes stay integers.
        if active * full + (total - active) * weights <= budget * samples:
            break
        active -= 1
    return active
