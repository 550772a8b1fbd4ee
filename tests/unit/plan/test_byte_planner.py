# SPDX-License-Identifier: Apache-2.0
"""The byte planner against brute force over all contiguous partitions of small cases."""

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.plan.byte_planner import (
    InfeasiblePlan,
    OperatorTable,
    WindowPlan,
    balanced,
    bytes_over_budget,
    fewest_slots,
    window_bytes_bound,
)


def table(*rows):
    """Operators of `rows`: a name, and the bytes on each rank in full and of the weights."""
    names, *sizes = zip(*rows, strict=True)
    return OperatorTable(list(names), *(np.array(kind, dtype=np.int64) for kind in sizes))


NONE = OperatorTable([], np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0), dtype=np.int64))


def one_size(count, full=12, weights=2):
    return table(*((str(index), (full,), (weights,)) for index in range(count)))


def shuffled(operators, random):
    order = random.sample(range(len(operators)), len(operators))
    names = [operators.names[index] for index in order]
    return OperatorTable(names, operators.full[order], operators.weights[order])


@st.composite
def operators_lists(draw):
    ranks = draw(st.integers(1, 3))
    sizes = st.integers(0, 30).flatmap(lambda full: st.tuples(st.just(full), st.integers(0, full)))
    rows = draw(st.lists(st.lists(sizes, min_size=ranks, max_size=ranks), min_size=1, max_size=7))
    return table(*((f'op{index}', *zip(*row, strict=True)) for index, row in enumerate(rows)))


def partitions(operators, window):
    """All cuts of the operators, in order, into `window` slots, empty slots included."""
    names = operators.names
    for cuts in combinations_with_replacement(range(len(names) + 1), window - 1):
        yield [names[start:end] for start, end in pairwise([0, *cuts, len(names)])]


def priced(operators, slots):
    """Bytes per slot and rank from the definition: own full, later weights, earlier nothing."""
    position = {name: index for index, slot in enumerate(slots) for name in slot}
    at = np.array([position[name] for name in operators.names])
    return [
        (
            operators.full[at == index].sum(axis=0) + operators.weights[at > index].sum(axis=0)
        ).tolist()
        for index in range(len(slots))
    ]


def largest(operators, slots):
    """Largest slot over slots and ranks."""
    return max(map(max, priced(operators, slots)))


def least(operators, window):
    """Largest slot of the best plan of `window` slots."""
    return min(largest(operators, slots) for slots in partitions(operators, window))


@given(operators_lists(), st.integers(1, 9))
def test_every_operator_is_full_exactly_once_and_in_order(operators, window):
    plan = balanced(operators, window)
    assert plan.window == window == len(plan.slots)
    assert [name for slot in plan.slots for name in slot] == operators.names


@given(operators_lists(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_slot_bytes_are_own_full_and_later_light(operators, window, random):
    plan = balanced(operators, window)
    assert plan.slot_bytes(shuffled(operators, random)).tolist() == priced(operators, plan.slots)


@given(operators_lists(), st.integers(1, 120))
def test_fewest_slots_is_minimal_or_names_the_infeasible_operator(operators, budget):
    try:
        plan = fewest_slots(operators, budget)
    except InfeasiblePlan as error:
        assert least(operators, len(operators)) > budget
        index = operators.names.index(error.operator)
        tail = operators.weights[index + 1 :, error.rank].sum()
        assert error.needed == operators.full[index, error.rank] + tail > error.budget == budget
        return
    assert largest(operators, plan.slots) == least(operators, plan.window) <= budget
    assert bytes_over_budget(plan, operators, budget) == 0
    assert plan.window == 1 or least(operators, plan.window - 1) > budget


@given(operators_lists(), st.integers(1, 4))
def test_balanced_has_the_smallest_largest_slot(operators, window):
    assert largest(operators, balanced(operators, window).slots) == least(operators, window)


@given(operators_lists(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_window_bytes_bound_holds_for_every_order(operators, window, random):
    bound = window_bytes_bound(operators, window)
    plan = balanced(shuffled(operators, random), window)
    assert (plan.slot_bytes(operators).sum(axis=0) <= bound).all()


def test_window_bytes_bound_is_reached_by_the_last_operator():
    operators = table(('empty', (0,), (0,)), ('last', (12,), (2,)))
    plan = WindowPlan((('empty',), (), ('last',)))
    assert plan.slot_bytes(operators).sum() == window_bytes_bound(operators, 3) == 16


@pytest.mark.parametrize('budget, window', [(3667, 5), (2500, 9)])
def test_equal_operators_follow_the_closed_form(budget, window):
    """W = ceil(ln(b / (b - F)) / ln(A / (A - F))) for A = 12, F = 2 bytes per parameter."""
    assert fewest_slots(one_size(1000), budget).window == window


def test_spare_slots_are_empty_and_at_the_end():
    operators = table(('a', (5,), (1,)), ('b', (5,), (1,)))
    assert balanced(operators, 4).slots == (('a',), ('b',), (), ())
    assert balanced(NONE, 2).slots == ((), ())
    assert fewest_slots(NONE, 1).slots == ((),)


def test_sizes_of_real_models_do_not_overflow():
    operators = one_size(300, 2**40, 2**37)
    assert balanced(operators, 7).slot_bytes(operators).max() <= 2**46
    assert fewest_slots(operators, 10**30).window == 1


def test_operator_sizes_are_checked():
    with pytest.raises(ValueError, match="'a'.*3 of weights on rank 1"):
        table(('a', (2, 2), (1, 3)))
    with pytest.raises(ValueError, match='0 <= weights'):
        one_size(1, weights=-1)
    with pytest.raises(ValueError, match=r"listed more than once: \['a'\]"):
        table(('a', (2,), (1,)), ('a', (2,), (1,)))
    with pytest.raises(ValueError, match='exactly the operators'):
        balanced(one_size(1), 1).slot_bytes(NONE)
    assert issubclass(InfeasiblePlan, ValueError)
