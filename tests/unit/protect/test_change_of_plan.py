# SPDX-License-Identifier: Apache-2.0
"""Ranks that hear of a plan at different times, around a recovery, end up with the same windows."""

from collections.abc import Iterator

import msgspec
import pytest

from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import Cycle
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.protect.training import SCHEDULE, Training, W

LATER = Cycle(
    origin=2 * W, plan=WindowPlan((('router', 'expert0'), ('expert1',))), digest='later', version=1
)  # of two iterations
TARGET = 2 * W + 1
"""Where a recovery has all ranks begin a window."""


@pytest.fixture
def training() -> Iterator[Training]:
    with tmpfs_directory() as path:
        training = Training(path)
        yield training
        training.stop()


def begin_window(training: Training) -> None:
    checkpointer = training.checkpointer
    checkpointer.stop_capturing()
    checkpointer.roll_back(training.iteration - 1)
    checkpointer.begin_window(training.iteration)


def windows(training: Training) -> list[tuple[int, str]]:
    """Start and plan of those that were complete after the recovery."""
    return [(name.start, name.plan) for name in training.heard if name.start >= TARGET]


IN_STEP = [(start, 'later') for start in range(TARGET, TARGET + 8, 2)]


def test_rank_that_receives_the_plan_late_aligns_with_the_others(
    training: Training,
) -> None:
    training.run_until(TARGET)
    begin_window(training)
    training.run_until(TARGET + 1)
    training.checkpointer.schedule_next(LATER)
    training.run_until(TARGET + 8)
    assert windows(training) == IN_STEP[1:]


def test_new_process_that_receives_the_plan_aligns_too() -> None:
    """It is told where windows begin now by a survivor that has not heard of the plan yet."""
    with tmpfs_directory() as path:
        training = Training(path, msgspec.structs.replace(SCHEDULE, origin=TARGET))
        training.iteration = TARGET
        training.checkpointer.schedule_next(LATER)
        training.run_until(TARGET + 8)
        assert windows(training) == IN_STEP
        training.stop()


@pytest.mark.parametrize('first', [True, False], ids=['before', 'after'])
def test_of_two_plans_for_one_iteration_the_later_is_in_force(
    first: bool, training: Training
) -> None:
    """Whether it is heard of before or after the window that all begin."""
    later = msgspec.structs.replace(LATER, origin=TARGET)
    training.run_until(TARGET)
    if first:
        training.checkpointer.schedule_next(later)
    begin_window(training)
    if not first:
        training.checkpointer.schedule_next(later)
    training.run_until(TARGET + 8)
    assert windows(training) == IN_STEP
    assert training.checkpointer.schedule.version == 1
