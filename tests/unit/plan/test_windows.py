# SPDX-License-Identifier: Apache-2.0
"""Windows by the limits of each link: the copy of each slot, the mean send over a window."""

from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.plan.byte_planner import (
    InfeasiblePlan,
    OperatorTable,
    balanced,
    fewest_slots,
    window_bytes_bound,
)
from moevement_ext.plan.windows import (
    SPREAD_MARGIN,
    Budgets,
    Cores,
    budgets,
    checkpoint_s,
    needs,
    shortest,
    spread,
)
from tests.unit.plan.test_byte_planner import one_size, operators_lists, table

LARGE_LAST = table(*((f'expert{i}', (1,), (0,)) for i in range(4)), ('embedding', (16,), (0,)))
"""The last operator is larger than all others together."""


def sent_in_time(slots: list[int], link: int) -> bool:
    """True if all of a window is sent when the next one begins."""
    waiting = 0
    for size in slots:
        waiting = max(waiting + size - link, 0)
    return waiting == 0


@given(operators_lists(), st.integers(1, 9), st.integers(0, 5))
def test_needs_equal_the_bytes_of_each_plan(
    operators: OperatorTable, window: int, always: int
) -> None:
    """Including windows with more slots than operators."""
    need = list(islice(needs(operators, always), window))[-1]
    slots = balanced(operators, window).slot_bytes(operators)
    ranks = (slots + always).T.tolist()
    assert need.copied == max(max(rank) for rank in ranks)
    assert need.file == max(window_bytes_bound(operators, window)) + window * always
    mean = max(Fraction(sum(rank), window) for rank in ranks)
    assert need.sent - 1 < mean <= need.sent
    assert all(sent_in_time(rank, need.burst) for rank in ranks)
    assert need.burst == 0 or not all(sent_in_time(rank, need.burst - 1) for rank in ranks)


@given(operators_lists(), st.integers(1, 120))
def test_only_the_copy_counts_without_replicas(operators: OperatorTable, budget: int) -> None:
    """Hence ranks need not know the operators of other stages to find the common window."""
    try:
        expected = fewest_slots(operators, budget).window
    except InfeasiblePlan:
        expected = None
    carried = Budgets(budget, None, None)
    assert shortest([needs(operators)], carried, len(operators) + 1) == expected


def test_operator_beyond_the_network_budget_has_a_plan() -> None:
    """It must be copied before the next update, but may be sent later."""
    of_window = list(islice(needs(LARGE_LAST), 4))
    assert [need[:3] for need in of_window] == [(20, 20, 20), (16, 10, 16), (16, 7, 8), (16, 5, 6)]
    assert shortest([of_window], Budgets(16, 10, 20), 4) == 2
    assert shortest([of_window], Budgets(16, 10, 15), 4) == 3, 'at the end all must be sent'
    assert shortest([of_window], Budgets(16, 6, 12), 4) == 4
    assert shortest([of_window], Budgets(16, 6, 12), 3) is None
    assert shortest([of_window], Budgets(15, 10, 20), 4) is None, 'the copy must'


def test_stage_with_the_longest_window_decides() -> None:
    first, second = one_size(1, 8, 0), LARGE_LAST
    assert shortest([needs(first), needs(second)], Budgets(16, None, None), 8) == 2
    assert shortest([needs(first), needs(first)], Budgets(16, None, None), 8) == 1


BF16, FP32 = one_size(32, 12, 2), one_size(32, 12, 4)
"""Files of two slots take 1.17 and 1.33 times those of one."""


@pytest.mark.parametrize(
    ('operators', 'within', 'failures', 'window'),
    [
        (BF16, 384, 1e-4, 1),  # the share is kept
        (BF16, 300, 1e-4, 2),
        (BF16, 1, 1e-4, 2),  # no window keeps it, and a longer one would have fewer bytes
        (BF16, 380, 1e-3, 1),  # what is saved is less than the replays cost
        (BF16, 300, 1e-2, 1),
        (FP32, 300, 1e-4, 1),  # the files would take too much memory
    ],
)
def test_cores_demand_a_second_slot_if_it_costs_less(
    operators: OperatorTable, within: int, failures: float, window: int
) -> None:
    cores = Cores(within, 0.02, failures)
    for links, longest in ((Budgets(384, None, None), 1), (Budgets(150, None, None), 4)):
        by_links = shortest([needs(operators)], links, 8)
        assert by_links is not None and by_links >= longest
        found = shortest([needs(operators)], links._replace(cores=cores), 8)
        assert found == max(window, by_links), 'the cores lengthen what the links sustain'
    assert shortest([needs(operators)], Budgets(1, None, None, cores), 8) is None


@given(
    operators_lists(),
    st.integers(1, 120),
    st.lists(st.integers(1, 200), min_size=2, max_size=4).map(sorted),
    st.integers(1, 9),
    st.floats(0, 0.1),
)
def test_slower_cores_lengthen_the_window_within_limits(
    operators: OperatorTable, budget: int, cores: list[int], longest: int, failures: float
) -> None:
    of_window = list(islice(needs(operators), longest))
    links = Budgets(budget, None, None)
    found = [
        shortest([of_window], links._replace(cores=Cores(cpu, 0.02, failures)), longest)
        for cpu in cores
    ]
    by_links = shortest([of_window], links, longest)
    if by_links is None:
        assert found == [None] * len(cores)
        return
    windows = [window for window in found if window is not None]
    assert windows == sorted(windows, reverse=True) and len(windows) == len(cores)
    first = of_window[by_links - 1]
    for window, cpu in zip(windows, cores, strict=True):
        need = of_window[window - 1]
        assert links.carry(need) and need.file <= 1.25 * first.file
        assert window == by_links or 2 * window - 1 <= 3, 'iterations again'
        if first.sent <= cpu:
            assert window == by_links


def test_each_budget_follows_its_link() -> None:
    assert budgets(2.0, 25e9, None, 2, 0.5) == Budgets(25_000_000_000, None, None)
    assert budgets(2.0, 25e9, 10e9, 0, 0.5) == Budgets(25_000_000_000, None, None)
    found = budgets(2.0, 25e9, 10e9, 2, hidden_fraction=0.5, network_share=0.25)
    assert found == Budgets(25_000_000_000, 2_500_000_000, 10_000_000_000)
    assert found.bytes == 2_500_000_000
    of_cores = {'cpu_bytes_per_s': 3.0, 'cpu_share': 0.02, 'failures_per_s': 0.25}
    cores = Cores(bytes=6, share=0.02, failures=0.5)
    assert budgets(2.0, 25e9, 10e9, 2, 0.5, 0.25, **of_cores) == found._replace(cores=cores)
    assert budgets(2.0, 25e9, None, 2, **of_cores).cores == cores


def test_network_limit_replaces_the_share() -> None:
    """Also at the end of a window; the link may be slower or unknown."""
    copy = 25_000_000_000
    for link, held in ((10e9, 4e9), (None, 4e9), (1e9, 1e9)):
        found = budgets(2.0, 25e9, link, 2, 0.5, network_bytes_per_s=4e9)
        assert found == Budgets(copy, int(held), int(held))
    assert budgets(2.0, 25e9, 10e9, 0, 0.5, network_bytes_per_s=4e9).network_bytes is None


@pytest.mark.parametrize(
    ('slots', 'bytes_an_iteration'),
    [([8, 8, 8, 8], 8), ([20, 4, 6, 100], 10), ([4, 4, 16, 1], 16), ([6, 50], 6)],
)
def test_sends_before_the_last_slot_are_spread_over_the_window(
    slots: list[int], bytes_an_iteration: float
) -> None:
    rate = spread(slots, 2.0, 3)
    assert rate == SPREAD_MARGIN * 3 * bytes_an_iteration / 2.0
    waiting = 0.0
    for size in slots[:-1]:
        waiting = max(waiting + 3 * size - 2.0 * rate, 0.0)
    assert waiting == 0.0, 'when the last slot comes'


@pytest.mark.parametrize(
    ('copied', 'sent', 'copies', 'limit', 'seconds'),
    [
        (None, 4.0, 2, None, None),
        (10.0, None, 2, None, None),
        (10.0, None, 0, None, (2.0, 2.0)),
        (10.0, 4.0, 2, None, (2.0, 12.0)),
        (10.0, None, 2, 5.0, (2.0, 10.0)),
        (10.0, 4.0, 2, 5.0, (2.0, 12.0)),
        (10.0, 40.0, 2, 5.0, (2.0, 10.0)),
    ],
)
def test_checkpoint_time_includes_copy_and_sends(
    copied: float | None,
    sent: float | None,
    copies: int,
    limit: float | None,
    seconds: tuple[float, float] | None,
) -> None:
    """A limit that throttles all sends leaves no other rate to measure."""
    assert checkpoint_s(20, copied, sent, copies, limit) == seconds
