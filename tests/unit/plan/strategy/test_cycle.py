# SPDX-License-Identifier: Apache-2.0
"""Iterations that a cycle captures."""

from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import Cycle, PlanParameters

SLOTS = WindowPlan((('a',), ('b',)))


def captured(cycle: Cycle) -> list[int | None]:
    return [cycle.slot(iteration) for iteration in range(9)]


def test_windows_follow_each_other_without_idle_iterations() -> None:
    cycle = Cycle(origin=1, plan=SLOTS, digest='digest')
    assert captured(cycle) == [None, 0, 1, 0, 1, 0, 1, 0, 1]
    assert cycle.period == 2


def test_idle_iterations_are_not_captured() -> None:
    cycle = Cycle(origin=1, plan=SLOTS, digest='digest', idle=2)
    assert captured(cycle) == [None, 0, 1, None, None, 0, 1, None, None]
    assert [cycle.position(iteration) for iteration in (1, 4, 5)] == [0, 3, 0]


def test_next_plan_begins_at_a_window_boundary() -> None:
    present = PlanParameters(origin=4, window=1, idle=4)
    assert (present.after(9) - present.origin) % present.period == 0
    assert present.after(9) > 9 + 2 * present.period
