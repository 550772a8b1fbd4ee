# SPDX-License-Identifier: Apache-2.0
import pytest

from moevement_ext.launch.config import Action, LaunchConfig, StagedFault
from moevement_ext.launch.staged_faults import StagedFaults

pytestmark = pytest.mark.timed

KILL, STOP = StagedFault(Action.KILL, 0, 8), StagedFault(Action.STOP, 1, 8)


def test_due_once() -> None:
    faults = StagedFaults(LaunchConfig(__file__, nodes=2, faults=(KILL, STOP)))
    assert faults.due(' [2030-01-01 10:00:00.000000] iteration        7/      12 | lr') == []
    assert faults.due('iteration 9 of the log 9/12') == []
    assert faults.due(' [2030-01-01 10:00:01.000000] iteration        8/      12 |') == [
        KILL,
        STOP,
    ]
    assert faults.pending == []
    assert faults.due('iteration        8/      12 | again, after the recovery') == []


def test_due_when_the_log_passes_over_the_iteration() -> None:
    faults = StagedFaults(LaunchConfig(__file__, faults=(KILL,)))
    assert faults.due('iteration       10/      12 | with --log-interval 5') == [KILL]
