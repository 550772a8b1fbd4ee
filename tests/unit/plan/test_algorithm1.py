# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 as printed has the faults its docstring states, and the byte planner does not."""

import pytest

from moevement_ext.plan.algorithm1 import active_operators, plan_as_printed
from moevement_ext.plan.byte_planner import (
    InfeasiblePlan,
    OperatorBytes,
    bytes_over_budget,
    fewest_slots,
)


def equal(count):
    return [OperatorBytes(str(index), (12,), (2,)) for index in range(count)]


@pytest.mark.parametrize('count, budget, window', [(1200, 4400, 6), (1000, 2500, 20)])
def test_equal_operators_take_more_slots_than_needed(count, budget, window):
    operators = equal(count)
    plan = plan_as_printed(operators, budget)
    assert plan.window == window > fewest_slots(operators, budget).window
    assert bytes_over_budget(plan, operators, budget) == 0


def test_slots_hold_equal_counts_in_the_given_order():
    assert plan_as_printed(equal(7), 50).slots == (('0', '1', '2'), ('3', '4', '5'), ('6',))


def test_one_slot_holds_all_operators_if_they_fit():
    assert plan_as_printed(equal(4), 48).window == 1
    assert plan_as_printed([], 1).slots == ((),)


def test_two_active_operators_are_returned_unchecked():
    operators = equal(8)
    plan = plan_as_printed(operators, 1)
    assert active_operators(operators, 1) == 2
    assert bytes_over_budget(plan, operators, 1) > 0
    with pytest.raises(InfeasiblePlan):
        fewest_slots(operators, 1)


def test_one_operator_per_slot_is_never_tried():
    operators = [OperatorBytes(str(index), (12,), (1,)) for index in range(3)]
    assert fewest_slots(operators, 14).window == 3
    assert bytes_over_budget(plan_as_printed(operators, 14), operators, 14) > 0


def test_mean_sizes_hide_a_large_operator_and_a_loaded_rank():
    small = [OperatorBytes(str(index), (6,), (1,)) for index in range(6)]
    operators = [*small[:5], OperatorBytes('embedding', (34,), (5,)), small[5]]
    plan = plan_as_printed(operators, 40)
    assert bytes_over_budget(plan, operators, 40) > 0
    assert bytes_over_budget(fewest_slots(operators, 40), operators, 40) == 0
    lopsided = [OperatorBytes(str(index), (12, 0), (2, 0)) for index in range(6)]
    assert bytes_over_budget(plan_as_printed(lopsided, 36), lopsided, 36) == 36
