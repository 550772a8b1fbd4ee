# SPDX-License-Identifier: Apache-2.0
"""The benchmark of recovery: phases out of logs and events."""

from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from moevement_ext.events import Event, NextTier, Recovered, WorkerStarted
from tests.unit.tools.samples import CONVERTED, HARDWARE, START, event, iteration_line
from tools.bench import recovery, restarts
from tools.lab.errors import LabError
from tools.lab.run_log import RunLog, parse_log


def log_of(*iterations: tuple[int, float] | str) -> RunLog:
    """Of pairs of number and seconds, and of other lines."""
    lines = (item if isinstance(item, str) else iteration_line(*item) for item in iterations)
    return parse_log(''.join(lines))


def test_phases_of_a_dense_recovery_add_up() -> None:
    killed_at = (START + timedelta(seconds=5)).timestamp()
    log = log_of((4, 4.0), (5, 5.0), (3, 15.5), (4, 16.5), (5, 17.5), (6, 18.5))
    found = restarts.dense_restart(log, killed_at, [])
    assert found.died_after == 5
    assert found.recomputed == 3
    assert found.seconds == pytest.approx(13.5)
    assert found.phases == pytest.approx(
        {'process start, load': 10.0, 'recompute': 2.5, 'new iteration': 1.0}
    )


def sparse_events(killed_at: float) -> list[Event]:
    """Two ranks; rank 1 is slower."""
    seconds = {'find': 0.5, 'obtain': 0.5, 'load': 1.0, 'convert': 2.0, 'catch_up': 1.0}
    return [
        event(WorkerStarted, 0, killed_at - 9),
        event(WorkerStarted, 0, killed_at + 4),
        event(WorkerStarted, 1, killed_at + 5),
        event(Recovered, 0, killed_at + 11.5, replayed=3, seconds=seconds),
        event(Recovered, 1, killed_at + 12.0, replayed=3, seconds=seconds),
    ]


def test_phases_of_a_sparse_recovery_add_up() -> None:
    killed_at = (START + timedelta(seconds=5)).timestamp()
    log = log_of((4, 4.0), (5, 5.0), CONVERTED, (5, 16.8), (6, 18.0))
    events = sparse_events(killed_at)
    found = restarts.sparse_restart(log, killed_at, events, 2, ['rng'])
    assert found.recomputed == 3
    assert found.seconds == pytest.approx(13.0)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert found.phases['process start'] == pytest.approx(5.0)
    assert found.phases['set-up'] == pytest.approx(2.0)
    assert found.phases['catch up'] == pytest.approx(1.0)
    assert found.phases['new iteration'] == pytest.approx(1.0)


def test_exit_status_is_that_of_sparse_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = restarts.Restart(1.0, {'process start': 1.0}, 1, 25, [])
    inexact = msgspec.structs.replace(exact, seconds=3.0, different=['rng'])
    bench = recovery.Bench(Path(), Path(), 2, 25, 10, 'auto')
    for sparse, dense, status in ((exact, inexact, 0), (inexact, exact, 1)):
        runs = {recovery.SPARSE: sparse, recovery.DENSE: dense}
        report = recovery.summarize(bench, HARDWARE, [runs])
        assert report.ratio.median == dense.seconds / sparse.seconds
        monkeypatch.setattr(recovery, 'measure', lambda *_, found=report: found)
        assert recovery.main([]) == status


def test_a_rank_that_did_not_recover_from_memory_is_no_result() -> None:
    killed_at = START.timestamp()
    log = log_of((4, 4.0), CONVERTED, (5, 16.8))
    with pytest.raises(LabError, match='did not report'):
        restarts.sparse_restart(log, killed_at, sparse_events(killed_at)[:4], 2, [])


def test_a_job_that_gave_up_host_memory_is_no_result() -> None:
    killed_at = START.timestamp()
    fallen_back = event(NextTier, 0, killed_at + 1, reason='too small', tier='the start')
    events = [*sparse_events(killed_at), fallen_back]
    with pytest.raises(LabError, match='not used: too small'):
        restarts.sparse_restart(log_of((4, 4.0), CONVERTED, (5, 16.8)), killed_at, events, 2, [])


def test_a_job_that_stays_behind_is_no_result() -> None:
    with pytest.raises(LabError, match='never got beyond iteration 5'):
        restarts.first_new_iteration(log_of((5, 5.0), (4, 8.0), (5, 9.0)))


def test_kill_comes_half_way_between_two_checkpoints() -> None:
    assert recovery.parse_arguments(['--dense-interval', '8']).kill_after == 20
    with pytest.raises(SystemExit):
        recovery.parse_arguments(['--kill-after', '10'])
