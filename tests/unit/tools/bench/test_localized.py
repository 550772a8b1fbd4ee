# SPDX-License-Identifier: Apache-2.0
"""The benchmark of localized recovery: what it reads out of events and memory, and its ratios."""

import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moevement_ext.events import Event, FailureDetected, Recovered, RecoveryStarted
from tests.unit.tools.samples import HARDWARE, event
from tools.bench import localized as bench_localized
from tools.bench import localized_report as localized
from tools.bench.localized_report import Comeback, Cost, LocalizedReport
from tools.lab.cpu_clock import cpu_seconds
from tools.lab.errors import LabError
from tools.lab.run_log import Iteration, RunLog

VICTIM = localized.VICTIM


def events() -> list[Event]:
    """A worker is killed at 100 s; the survivors notice until 100.3 s; all are back at 104 s."""
    found = [event(FailureDetected, rank, 100.2 + rank / 30) for rank in (0, 1, 3)]
    found.append(event(RecoveryStarted, VICTIM, 101.3, start=36, dense_at=39))
    nothing = dict.fromkeys(('unblock', 'respawn', 'regroup', 'fetch', 'convert', 'catch_up'), 0.0)
    for rank in range(localized.STAGES):
        seconds, replayed = nothing | {'unblock': 0.1}, 0
        if rank == VICTIM:
            seconds, replayed = nothing | {'regroup': 0.5, 'convert': 1.0, 'catch_up': 0.5}, 6
        fields: Any = {'target': 40, 'replayed': replayed, 'seconds': seconds}
        found.append(event(Recovered, rank, 104.0, **fields))
    return sorted(found, key=lambda item: item.time)


def run_log(*numbers: int) -> RunLog:
    return RunLog([[Iteration(64.5 + n, n, 500.0, 5.0) for n in numbers]], [])


def cost(iteration_s: float, exposed_ms: float = 0.0, save_ms: float = 0.0) -> Cost:
    return Cost(iteration_s, 0.4, exposed_ms, save_ms, 1000, 10, 'same')


def costs(sparse_s: float, exposed_ms: float) -> list[dict[str, Cost]]:
    return [
        {
            localized.PLAIN: cost(0.5),
            localized.WINDOWS: cost(0.5),
            localized.LOGS: cost(sparse_s, exposed_ms),
            localized.DENSE: cost(0.9, save_ms=400.0),
        }
    ]


def recovery(seconds: float, stage_iterations: int, replay_s: float = 0.0, *kinds: str) -> Comeback:
    return Comeback(seconds, {'all': seconds}, stage_iterations, replay_s, list(kinds))


def report(*different: str) -> LocalizedReport:
    runs = {
        localized.SPARE: recovery(3.0, 6, 3.0, *different),
        localized.COLD: recovery(9.0, 6, 3.6),
        localized.WHOLE: recovery(18.0, 24),
        localized.DISK: recovery(30.0, 40, 0.0, 'rng'),
    }
    return localized.summarize(HARDWARE, 4, 30, 20, costs(0.52, 1.0), [runs])


def test_phases_add_up() -> None:
    found = localized.localized_recovery(run_log(39, 40, 41), 100.0, 100.1, events(), [])
    assert found.seconds == pytest.approx(5.5)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert found.phases['die'] == pytest.approx(0.1)
    assert found.phases['detect'] == pytest.approx(0.1)
    assert found.phases['respawn'] == pytest.approx(1.0)
    assert found.phases['resume'] == pytest.approx(0.7)
    assert found.phases['new iteration'] == pytest.approx(1.5)
    assert (found.stage_iterations, found.replay_s) == (6, 1.5)


def test_an_iteration_committed_before_is_not_new() -> None:
    with pytest.raises(LabError, match='never got beyond iteration 40'):
        localized.localized_recovery(run_log(39, 40), 100.0, 100.1, events(), [])


@pytest.mark.parametrize(
    ('sparse_s', 'exposed_ms', 'interval'),
    [(0.52, 1.0, 20.0), (0.49, 4.0, 100.0), (1.5, 1.0, 1.0)],
    ids=['measured', 'hidden by noise', 'dearer than a checkpoint'],
)
def test_interval_of_equal_overhead(sparse_s: float, exposed_ms: float, interval: float) -> None:
    assert localized.equal_interval(costs(sparse_s, exposed_ms)) == pytest.approx(interval)


def test_summary() -> None:
    found = report()
    assert found.methods[localized.DISK].ratio.median == pytest.approx(10.0)
    assert found.overhead[localized.LOGS].median == pytest.approx(1.04)
    assert found.replay_bound_s.median == pytest.approx(2.4)
    assert found.replay_over_bound.max == pytest.approx(1.5)
    assert found.exact, 'plain checkpoints need not lead to the same bits'
    assert not report('exp_avg').exact
    localized.print_report(found, Console(quiet=True))


def test_bytes_in_host_memory(tmp_path: Path) -> None:
    for rank, size in ((0, 100), (1, 50)):
        folder = tmp_path / 'run' / f'node{rank}' / str(rank)
        folder.mkdir(parents=True)
        (folder / 'upstream-log').write_bytes(bytes(size))
        (folder / 'free-0.window').write_bytes(bytes(7))
    assert bench_localized.reserved(tmp_path) == 164


def test_bytes_logged_in_an_iteration(tmp_path: Path) -> None:
    """Four stages: 6 of the 8 ends of a stage face another one; 4 micro-batches of 4 samples."""
    bench = bench_localized.Bench(tmp_path / 'text', tmp_path, window=4, iterations=12)
    flags = bench._training_flags(12, tmp_path / 'digest.json')
    assert bench_localized.logged_bytes(flags) == 6 * 4 * (4 * 128 * 256 * 2)


def test_cpu_seconds() -> None:
    spent = cpu_seconds(os.getpid())
    assert spent is not None and spent > 0
    assert cpu_seconds(2**22 + 1) is None  # above every process id of Linux


@pytest.mark.parametrize('flags', ['--rounds 0', '--iterations 6', '--window 0'])
def test_wrong_flags_are_named(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_localized.parse_arguments(flags.split())
    assert flags in capsys.readouterr().err
