# SPDX-License-Identifier: Apache-2.0
import pytest

from moevement_ext.launch.launch_config import LaunchConfig, StagedAction, StagedFault
from moevement_ext.launch.staged_faults import StagedFaults, logged_iteration

pytestmark = pytest.mark.timed

KILL, STOP = StagedFault(StagedAction.KILL, 0, 8), StagedFault(StagedAction.STOP, 1, 8)


@pytest.mark.parametrize(
    ('line', 'iteration'),
    [
        (' [2030-01-01 10:00:00.000000] iteration        7/      12 | lr', 7),
        ('iteration       10/      12 | with --log-interval 5', 10),
        ('iteration 9 of the log 9/12', None),
    ],
)
def test_iterations_are_read_from_the_log(line: str, iteration: int | None) -> None:
    assert logged_iteration(line) == iteration


def test_fault_is_due_once() -> None:
    faults = StagedFaults(LaunchConfig(__file__, nodes=2, faults=(KILL, STOP)))
    assert faults.due(7) == []
    assert faults.due(8) == [KILL, STOP]
    assert faults.pending == []
    assert faults.due(8) == []  # the iteration is logged again after the recovery


def test_fault_is_due_when_the_log_skips_its_iteration() -> None:
    faults = StagedFaults(LaunchConfig(__file__, faults=(KILL,)))
    assert faults.due(10) == [KILL]
