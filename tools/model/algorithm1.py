# SPDX-License-Identifier: Apache-2.0
"""The paper's Algorithm 1 as printed: a baseline for comparison, not for training.

Algorithm 1 starts with every operator active (captured in full) in slot 0 and freezes one more
until slot 0 fits, then puts that many operators in each slot. Its faults: docs/planning.md.
"""

from itertools import batched

from moevement_ext.plan.byte_planner import OperatorTable, WindowPlan


def plan_as_printed(operators: OperatorTable, budget: int) -> WindowPlan:
    """The window of Algorithm 1 for operators in the given order; slots may exceed the budget.

    `budget` is the bytes that can be copied in one iteration (bandwidth times iteration time).
    The paper has no ranks: the mean is over operators and ranks, so the algorithm prices the
    mean rank.
    """
    full, weights = int(operators.full.sum()), int(operators.weights.sum())
    total = active = len(operators)
    # Both sides times the number of samples, so that the mean sizes stay integers.
    most = budget * operators.full.size
    while active > 2 and active * full + (total - active) * weights > most:
        active -= 1
    return WindowPlan(tuple(batched(operators.names, active)) if active else ((),))
