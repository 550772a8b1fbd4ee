# SPDX-License-Identifier: Apache-2.0
"""The byte planner against brute force over all contiguous partitions of small cases."""

from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.plan.byte_planner import (
    InfeasiblePlan,
    OperatorBytes,
    WindowPlan,
    balanced,
    bytes_over_budget,
    fewest_slots,
    hideable_budget,
    plan_stages,
    window_bytes_bound,
)


@st.composite
def operators_lists(draw, ranks=None, most=7):
    ranks = ranks or draw(st.integers(1, 3))
    sizes = st.integers(0, 30).flatmap(lambda full: st.tuples(st.just(full), st.integers(0, full)))
    rows = draw(
        st.lists(st.lists(sizes, min_size=ranks, max_size=ranks), min_size=1, max_size=most)
    )
    return [
        OperatorBytes(f'op{index}', tuple(f for f, _ in row), tuple(li for _, li in row))
        for index, row in enumerate(rows)
    ]


@st.composite
def operators_and_budgets(draw):
    operators = draw(operators_lists())
    return operators, tuple(draw(st.integers(1, 120)) for _ in operators[0].full)


def partitions(operators, window):
    """All cuts of the operators, in order, into `window` slots, empty slots included."""
    names = [operator.name for operator in operators]
    for cuts in combinations_with_replacement(range(len(names) + 1), window - 1):
        yield [names[start:end] for start, end in pairwise([0, *cuts, len(names)])]


def priced(operators, slots):
    """Bytes per slot and rank from the definition: own full, later weights, earlier nothing."""
    position = {name: index for index, slot in enumerate(slots) for name in slot}
    return [
        [
            sum(op.full[rank] for op in operators if position[op.name] == index)
            + sum(op.weights[rank] for op in operators if position[op.name] > index)
            for rank in range(len(operators[0].full))
        ]
        for index in range(len(slots))
    ]


def largest(operators, slots, budgets):
    """Largest slot over slots and ranks, as a share of the rank's budget."""
    sizes = priced(operators, slots)
    return max(
        Fraction(size, own) for slot in sizes for size, own in zip(slot, budgets, strict=True)
    )


def in_scaled_bytes(share, budgets):
    """The planner's measure: bytes of the largest budget, rounded up."""
    scaled = share * max(budgets)
    return -(-scaled.numerator // scaled.denominator)


def fits(operators, window, budgets):
    return any(largest(operators, slots, budgets) <= 1 for slots in partitions(operators, window))


@given(operators_lists(), st.integers(1, 9))
def test_every_operator_is_full_exactly_once_and_in_order(operators, window):
    plan = balanced(operators, window)
    assert plan.window == window == len(plan.slots)
    assert [name for slot in plan.slots for name in slot] == [op.name for op in operators]
    assert plan.slot_of() == {name: i for i, slot in enumerate(plan.slots) for name in slot}


@given(operators_lists(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_slot_bytes_are_own_full_and_later_light(operators, window, random):
    plan = balanced(operators, window)
    given_in_any_order = random.sample(operators, len(operators))
    assert [list(slot) for slot in plan.slot_bytes(given_in_any_order)] == priced(
        operators, plan.slots
    )


@given(operators_and_budgets())
def test_fewest_slots_is_minimal_or_names_the_infeasible_operator(case):
    operators, budgets = case
    try:
        plan = fewest_slots(operators, budgets)
    except InfeasiblePlan as error:
        assert not fits(operators, len(operators), budgets)
        index = [op.name for op in operators].index(error.operator)
        tail = sum(op.weights[error.rank] for op in operators[index + 1 :])
        assert error.needed == operators[index].full[error.rank] + tail > error.budget
        assert error.budget == budgets[error.rank]
        return
    assert largest(operators, plan.slots, budgets) <= 1
    assert bytes_over_budget(plan, operators, budgets) == 0
    assert plan.window == 1 or not fits(operators, plan.window - 1, budgets)


@given(operators_and_budgets(), st.integers(1, 4))
def test_balanced_has_the_smallest_largest_slot(case, window):
    operators, budgets = case
    best = min(largest(operators, slots, budgets) for slots in partitions(operators, window))
    found = largest(operators, balanced(operators, window, budgets).slots, budgets)
    assert in_scaled_bytes(found, budgets) == in_scaled_bytes(best, budgets)


@given(operators_lists(), st.integers(1, 4))
def test_balanced_without_budget_is_minimal_to_the_byte(operators, window):
    ones = [1] * len(operators[0].full)
    best = min(largest(operators, slots, ones) for slots in partitions(operators, window))
    assert largest(operators, balanced(operators, window).slots, ones) == best


@given(operators_and_budgets())
def test_fewest_is_balanced_at_its_window(case):
    operators, budgets = case
    try:
        plan = fewest_slots(operators, budgets)
    except InfeasiblePlan:
        return
    best = min(largest(operators, slots, budgets) for slots in partitions(operators, plan.window))
    found = largest(operators, plan.slots, budgets)
    assert in_scaled_bytes(found, budgets) == in_scaled_bytes(best, budgets)


@given(st.lists(operators_lists(ranks=2, most=5), min_size=1, max_size=3), st.integers(40, 150))
def test_stages_share_the_fewest_window_that_fits_all(stages, budget):
    fewest = []
    for operators in stages:
        try:
            fewest.append(fewest_slots(operators, budget).window)
        except InfeasiblePlan:
            with pytest.raises(InfeasiblePlan) as error:
                plan_stages(stages, window=None, budget=budget)
            assert error.value.__notes__ == [f'in pipeline stage {len(fewest)}']
            return
    plans = plan_stages(stages, window=None, budget=budget)
    assert [plan.window for plan in plans] == [max(fewest)] * len(stages)
    for plan, operators in zip(plans, stages, strict=True):
        assert bytes_over_budget(plan, operators, budget) == 0


def test_stages_accept_a_given_window_over_budget():
    stage = [OperatorBytes('a', (12,), (2,)), OperatorBytes('b', (12,), (2,))]
    (plan,) = plan_stages([stage], window=1, budget=20)
    assert plan.slots == (('a', 'b'),)
    assert bytes_over_budget(plan, stage, 20) == 4


def test_stages_accept_budgets_per_stage_and_rank():
    stage = [OperatorBytes('a', (12, 1), (2, 0)), OperatorBytes('b', (12, 1), (2, 0))]
    assert [p.window for p in plan_stages([stage, stage], window=None, budget=[24, (14, 2)])] == [
        2,
        2,
    ]
    assert [p.window for p in plan_stages([stage, stage], window=None, budget=[24, (24, 2)])] == [
        1,
        1,
    ]
    with pytest.raises(ValueError, match='1 budgets for 2 stages'):
        plan_stages([stage, stage], window=None, budget=[24])


@given(operators_lists(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_window_bytes_bound_holds_for_every_order(operators, window, random):
    bound = window_bytes_bound(operators, window)
    shuffled = random.sample(operators, len(operators))
    total = map(sum, zip(*balanced(shuffled, window).slot_bytes(operators), strict=True))
    assert all(size <= most for size, most in zip(total, bound, strict=True))


def test_window_bytes_bound_is_reached_by_the_last_operator():
    operators = [OperatorBytes('empty', (0,), (0,)), OperatorBytes('last', (12,), (2,))]
    plan = WindowPlan((('empty',), (), ('last',)))
    assert sum(slot[0] for slot in plan.slot_bytes(operators)) == 16
    assert window_bytes_bound(operators, 3) == (16,)


def test_infeasible_plan_names_operator_rank_bytes_and_budget():
    operators = [OperatorBytes('small', (3, 3), (1, 1)), OperatorBytes('head', (4, 9), (1, 1))]
    with pytest.raises(InfeasiblePlan, match=r"'head'.* 9 bytes on rank 1.* 8 bytes") as error:
        fewest_slots(operators, (8, 8))
    assert (error.value.operator, error.value.rank) == ('head', 1)
    assert (error.value.needed, error.value.budget) == (9, 8)


def test_the_light_tail_alone_can_make_a_plan_infeasible():
    operators = [OperatorBytes('first', (6,), (1,)), OperatorBytes('second', (6,), (3,))]
    with pytest.raises(InfeasiblePlan, match="'first'"):
        fewest_slots(operators, 8)
    assert fewest_slots(operators, 9).window == 2


def test_one_slot_suffices_if_all_operators_fit():
    operators = [OperatorBytes(str(i), (12,), (2,)) for i in range(8)]
    assert fewest_slots(operators, 96).window == 1
    assert fewest_slots(operators, 95).window == 2


@pytest.mark.parametrize('budget, window', [(3667, 5), (2500, 9)])
def test_equal_operators_follow_the_closed_form(budget, window):
    """W = ceil(ln(b / (b - F)) / ln(A / (A - F))) for A = 12, F = 2 bytes per parameter."""
    operators = [OperatorBytes(str(i), (12,), (2,)) for i in range(1000)]
    assert fewest_slots(operators, budget).window == window


def test_spare_slots_are_empty_and_at_the_end():
    operators = [OperatorBytes('a', (5,), (1,)), OperatorBytes('b', (5,), (1,))]
    assert balanced(operators, 4).slots == (('a',), ('b',), (), ())
    assert balanced([], 2).slots == ((), ())
    assert fewest_slots([], 1).slots == ((),)


def test_sizes_of_real_models_do_not_overflow():
    operators = [OperatorBytes(str(i), (2**40, 2**40 + 1), (2**37, 2**37)) for i in range(300)]
    plan = balanced(operators, 7, (2**45, 2**46))
    assert max(slot[0] for slot in plan.slot_bytes(operators)) <= 2**46


def test_extremely_different_budgets_are_supported():
    operators = [OperatorBytes('a', (10**12, 10**12), (0, 0)), OperatorBytes('b', (5, 5), (0, 0))]
    plan = balanced(operators, 2, budget=(1, 10**12))
    assert plan.slots == (('a',), ('b',))
    assert balanced(operators, 1, budget=10**30).window == 1


def test_operator_sizes_are_checked():
    with pytest.raises(ValueError, match="'a'.*3 of weights on rank 1"):
        OperatorBytes('a', (2, 2), (1, 3))
    with pytest.raises(ValueError, match='2 ranks but weight sizes for 1'):
        OperatorBytes('a', (2, 2), (1,))
    with pytest.raises(ValueError, match='0 <= weights'):
        OperatorBytes('a', (2,), (-1,))
    a, wide = OperatorBytes('a', (2,), (1,)), OperatorBytes('b', (2, 2), (1, 1))
    with pytest.raises(ValueError, match=r"listed more than once: \['a'\]"):
        balanced([a, a], 1)
    with pytest.raises(ValueError, match=r'\[1, 2\] ranks'):
        balanced([a, wide], 1)
    with pytest.raises(ValueError, match='exactly the operators'):
        balanced([a], 1).slot_bytes([])
    assert issubclass(InfeasiblePlan, ValueError)


def test_plans_and_budgets_are_checked():
    a = OperatorBytes('a', (2,), (1,))
    with pytest.raises(ValueError, match='at least one slot'):
        WindowPlan(())
    with pytest.raises(ValueError, match=r"more than once.*\['a'\]"):
        WindowPlan((('a',), ('a',)))
    with pytest.raises(ValueError, match='window is 0'):
        balanced([a], 0)
    with pytest.raises(ValueError, match='window is 0'):
        window_bytes_bound([a], 0)
    with pytest.raises(ValueError, match='2 budgets for 1 ranks'):
        fewest_slots([a], (5, 5))
    with pytest.raises(ValueError, match='at least 1 byte'):
        fewest_slots([a], 0)


def test_hideable_budget_is_the_copy_of_the_hidden_fraction():
    assert hideable_budget(25e9, 2.0, 0.5) == 25_000_000_000


@pytest.mark.parametrize(
    'arguments, message',
    [
        ((0, 1.0), 'copy rate'),
        ((1e9, 0.0), 'iteration time'),
        ((1e9, 1.0, 1.5), 'hidden_fraction'),
    ],
)
def test_hideable_budget_refuses_impossible_measurements(arguments, message):
    with pytest.raises(ValueError, match=message):
        hideable_budget(*arguments)
