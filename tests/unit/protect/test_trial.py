# SPDX-License-Identifier: Apache-2.0
"""What is captured in a recovery counts for nothing before that is judged; then it counts, or goes.

Files, replicator and capture are real; one rank trains, and has window 0, from which it recovers.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import WindowName
from moevement_ext.protect.trial import Trial
from tests.unit.memory.samples import PLAN, restart, tmpfs_directory
from tests.unit.protect.training import DEADLINE_S, RANK, Training, W

START = WindowName(0, PLAN)


@pytest.fixture
def training() -> Iterator[Training]:
    with tmpfs_directory() as shm:
        training = Training(shm, max_wait_s=0.0)
        training.run_until(W)
        yield training
        training.lifecycle.stop()
        training.checkpointer.stop()


def on_trial(training: Training, until: int) -> None:
    training.lifecycle.trial = Trial(START, until, of_all=True)
    while training.iteration < until:
        training.step()
        training.checkpointer.drain()


def files(path: Path) -> list[str]:
    return sorted(file.name.split('-')[0] for file in path.glob('*.window'))


def test_captures_before_the_verdict_do_not_count(training: Training) -> None:
    on_trial(training, 2 * W)
    assert training.committed() == [0]
    assert training.heard == [START]
    assert training.windows.headers_after(0) == []
    assert training.windows.file(WindowName(W, PLAN)) is None
    assert files(training.windows.path) == ['unjudged', 'window']


def test_accepted_captures_equal_those_without_a_trial(training: Training) -> None:
    on_trial(training, 2 * W)
    training.lifecycle.accept()
    assert training.committed() == [0, W]
    training.heard.append(training.reported.get(timeout=DEADLINE_S))
    training.run_until(3 * W)
    assert [name.start for name in training.heard] == [0, W, 2 * W]


def test_a_window_is_accepted_in_its_midst(training: Training) -> None:
    on_trial(training, 2 * W - 1)
    training.lifecycle.accept()
    assert files(training.windows.path) == ['window', 'writing']
    assert len(training.windows.headers_after(0)) == W - 1
    training.run_until(2 * W)
    assert training.heard[-1].start == W


@pytest.mark.parametrize('until', [2 * W - 1, 2 * W])
def test_refused_captures_leave_nothing(until: int, training: Training) -> None:
    on_trial(training, until)
    training.checkpointer.stop_capturing()
    training.lifecycle.withdraw_captures()
    assert files(training.windows.path) == ['free', 'window']
    assert training.lifecycle.statistics.failures == 0
    training.lifecycle.go_back_to(START)
    training.checkpointer.roll_back(0)
    training.iteration = W
    training.run_until(2 * W)
    assert training.heard[-1].start == W


def test_successor_of_a_dead_process_finds_no_unjudged_capture(training: Training) -> None:
    on_trial(training, 2 * W - 1)
    capacity = training.windows.capacity_bytes
    after = OwnerWindows(restart(training.store), RANK, RANK, capacity)
    assert after.headers_after(-1) and after.headers_after(0) == []
    assert files(after.path) == ['free', 'window']


def test_newest_complete_window_of_many_is_kept(training: Training) -> None:
    """One that cannot be complete by then does not take its file."""
    on_trial(training, 4 * W + 1)
    training.lifecycle.accept()
    assert training.committed() == [0, 3 * W]
    assert training.agreed.is_given_up(W) and training.agreed.is_given_up(2 * W)


def test_a_window_that_is_refused_as_not_judged_cannot_be_committed(training: Training) -> None:
    on_trial(training, 2 * W)
    [(file, _)] = training.lifecycle.trial.windows()
    with pytest.raises(ValueError, match='not judged'):
        training.windows.commit(file)
