# SPDX-License-Identifier: Apache-2.0
from moevement_ext.local_cluster.config import Action, LaunchConfig, Strike
from moevement_ext.local_cluster.strikes import Strikes

KILL, STOP = Strike(Action.KILL, 0, 8), Strike(Action.STOP, 1, 8)


def test_due_once() -> None:
    strikes = Strikes(LaunchConfig(__file__, nodes=2, strikes=(KILL, STOP)))
    assert strikes.due(' [2030-01-01 10:00:00.000000] iteration        7/      12 | lr') == []
    assert strikes.due('iteration 9 of the log 9/12') == []
    assert strikes.due(' [2030-01-01 10:00:01.000000] iteration        8/      12 |') == [
        KILL,
        STOP,
    ]
    assert strikes.pending == []
    assert strikes.due('iteration        8/      12 | again, after the recovery') == []


def test_due_when_the_log_passes_over_the_iteration() -> None:
    strikes = Strikes(LaunchConfig(__file__, strikes=(KILL,)))
    assert strikes.due('iteration       10/      12 | with --log-interval 5') == [KILL]
