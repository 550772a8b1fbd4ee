# SPDX-License-Identifier: Apache-2.0
"""The benchmark of recovery: phases out of logs and events, and ratios over the rounds."""

from datetime import timedelta
from typing import Any

import pytest
from rich.console import Console

from moevement_ext.events import (
    Event,
    NextTier,
    Recovered,
    WorkerStarted,
)
from tests.unit.tools.samples import CONVERTED, HARDWARE, START, event, iteration_line
from tools.bench import recovery
from tools.bench.frame import Report
from tools.bench.recovery import VICTIM, Comeback
from tools.lab.errors import LabError
from tools.lab.run_log import Iteration, RunLog, parse_log

KILLED_AT = (START + timedelta(seconds=5)).timestamp()


def log_of(*iterations: tuple[int, float] | str) -> RunLog:
    """Of pairs of number and seconds, and of other lines."""
    lines = (item if isinstance(item, str) else iteration_line(*item) for item in iterations)
    return parse_log(''.join(lines))


# A whole job


def test_phases_of_a_dense_recovery_add_up() -> None:
    log = log_of((4, 4.0), (5, 5.0), (3, 15.5), (4, 16.5), (5, 17.5), (6, 18.5))
    found = recovery.dense_restart(log, KILLED_AT, [])
    assert found.stage_iterations == 3 * recovery.STAGES
    assert found.seconds == pytest.approx(13.5)
    assert found.phases == pytest.approx(
        {'process start, load': 10.0, 'recompute': 2.5, 'new iteration': 1.0}
    )


def sparse_events() -> list[Event]:
    """The last rank is slower."""
    seconds = {'find': 0.5, 'obtain': 0.5, 'load': 1.0, 'convert': 2.0, 'catch_up': 1.0}
    last = recovery.STAGES - 1
    return [
        event(WorkerStarted, 0, KILLED_AT - 9),
        *(event(WorkerStarted, rank, KILLED_AT + 4) for rank in range(last)),
        event(WorkerStarted, last, KILLED_AT + 5),
        *(
            event(Recovered, rank, KILLED_AT + 11.5, replayed=3, seconds=seconds)
            for rank in range(last)
        ),
        event(Recovered, last, KILLED_AT + 12.0, replayed=3, seconds=seconds),
    ]


BACK = log_of((4, 4.0), (5, 5.0), CONVERTED, (5, 16.8), (6, 18.0))


def test_phases_of_a_sparse_recovery_add_up() -> None:
    found = recovery.sparse_recovery(BACK, KILLED_AT, sparse_events(), ['rng'])
    assert (found.stage_iterations, found.different) == (3 * recovery.STAGES, ['rng'])
    assert found.seconds == pytest.approx(13.0)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert found.phases['process start'] == pytest.approx(5.0)
    assert found.phases['all else'] == pytest.approx(2.0)
    assert found.phases['catch up'] == pytest.approx(1.0)
    assert found.phases['new iteration'] == pytest.approx(1.0)


def test_a_job_that_gave_up_host_memory_is_no_result() -> None:
    fallen_back = event(NextTier, 0, KILLED_AT + 1, reason='too small', tier='the start')
    with pytest.raises(LabError, match='not used: too small'):
        recovery.sparse_recovery(BACK, KILLED_AT, [*sparse_events(), fallen_back], [])


# One worker


def localized() -> list[Event]:
    """A worker is killed at 100 s and started again at 101 s; all are back at 104 s."""
    nothing = dict.fromkeys(('unblock', 'respawn', 'regroup', 'fetch', 'convert', 'catch_up'), 0.0)
    events = [event(WorkerStarted, VICTIM, 101.0)]
    for rank in range(recovery.STAGES):
        seconds, replayed = nothing | {'unblock': 0.1}, 0
        if rank == VICTIM:
            seconds, replayed = nothing | {'regroup': 0.5, 'convert': 1.0, 'catch_up': 0.5}, 6
        fields: Any = {'scope': 'localized', 'target': 40, 'replayed': replayed}
        events.append(event(Recovered, rank, 104.0, seconds=seconds, **fields))
    return events


def run_log(*numbers: int) -> RunLog:
    return RunLog([[Iteration(64.5 + n, n, 500.0, 5.0) for n in numbers]], [])


def test_localized_recovery_has_the_phases_of_the_rolled_back_stage() -> None:
    found = recovery.sparse_recovery(run_log(35, 39, 40, 41), 100.0, localized(), [])
    assert found.seconds == pytest.approx(5.5)
    assert found.phases == pytest.approx(
        {
            'process start': 1.0,
            'regroup': 0.5,
            'convert': 1.0,
            'catch up': 0.5,
            'all else': 1.0,
            'new iteration': 1.5,
        }
    )
    assert found.stage_iterations == 6


# Over the rounds


def report(*different: str) -> Report:
    def back(seconds: float, stage_iterations: int, *kinds: str) -> Comeback:
        return Comeback(seconds, {'all': seconds}, stage_iterations, list(kinds))

    runs = {
        recovery.SPARE: back(3.0, 6, *different),
        recovery.COLD: back(9.0, 6),
        recovery.WHOLE: back(18.0, 24),
        recovery.DISK: back(30.0, 40, 'rng'),
    }
    settings = {'lose': recovery.ALL, 'window': 4, 'kill_after': 30, 'dense_interval': 20}
    return recovery.summarize(HARDWARE, settings, [runs])


def test_report_has_ratios_and_exactness() -> None:
    found = report()
    assert found.ways[recovery.DISK].figures['ratio'].median == pytest.approx(10.0)
    assert found.exact, 'plain checkpoints need not lead to the same bits'
    assert report('exp_avg').different == ['localized, hot spare: exp_avg']
    with (console := Console(width=200)).capture() as shown:
        recovery.print_report(found, console)
    assert 'all killed after iteration 30' in shown.get()
    assert 'localized, hot spare: all 3.00 s' in shown.get()
    assert 'whole job, torch_dist: differs in: rng.' in shown.get()
