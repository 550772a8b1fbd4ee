# SPDX-License-Identifier: Apache-2.0
import os
import signal
from pathlib import Path

import psutil
import pytest

from moevement_ext.launch.launch_config import LaunchConfig, StagedAction, StagedFault
from moevement_ext.launch.launcher_events import FaultStaged
from moevement_ext.launch.staged_faults import StagedFaults, logged_iteration
from moevement_ext.membership.mailbox import write_memory
from tests.unit.launch.conftest import Job, ended, failure

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]

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
    assert faults.due(9) == [KILL, STOP], 'the log may skip an iteration'
    assert faults.pending == []
    assert faults.due(9) == []  # the iteration is logged again after the recovery


@pytest.mark.parametrize('logged', [True, False])
def test_staged_kill_at_an_iteration(job: Job, logged: bool, tmp_path: Path) -> None:
    log_dir = tmp_path if logged else None
    job.finish_when = lambda: len(job.started(0)) == 2
    flags = ('1.0=print: iteration        7/      12 |', '1.0=print: iteration        8/      12')
    fault = StagedFault(StagedAction.KILL, 0, 8)
    assert job.run(*flags, nodes=2, log_dir=log_dir, faults=(fault,)) == 0
    assert ended(job) == {0: [-9, 0], 1: [0]}
    assert FaultStaged(str(fault)) in job.events


def test_staged_stop_keeps_the_worker_alive(job: Job) -> None:
    states = []

    def look(event: FaultStaged) -> None:
        pid = job.running.workers[0].pid
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        states.append(psutil.Process(pid).status())
        os.kill(pid, signal.SIGCONT)

    job.on(FaultStaged, look)
    job.finish_when = lambda: bool(states)
    faults = (StagedFault(StagedAction.STOP, 0, 3),)
    assert job.run('1.0=print:iteration 3/', nodes=2, faults=faults) == 0
    assert states == ['stopped']


def test_staged_node_kill_removes_workers_and_memory(job: Job, tmp_path: Path) -> None:
    for place in ('run/node0/0', 'run/node1/2', 'other/node1/2'):
        (tmp_path / 'memory' / place).mkdir(parents=True)
    left: list[list[str]] = []

    def look(event: FaultStaged) -> None:
        left.append(sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob('memory/*/*')))

    job.on(FaultStaged, look)
    job.finish_when = lambda: len(job.started()) == 6
    flags = (
        f'--sparse-ckpt-dir={tmp_path / "memory"}',
        '--sparse-ckpt-run-id',
        'run',
        '3.0=print:iteration 2/',
    )
    fault = StagedFault(StagedAction.KILL_NODE, 1, 2)
    assert job.run(*flags, nodes=2, workers_per_node=2, faults=(fault,)) == 0
    assert ended(job) == {0: [0], 1: [0], 2: [-9, 0], 3: [-9, 0]}
    assert left == [['memory/other/node1', 'memory/run/node0']]


@pytest.mark.parametrize('told', [True, False])
def test_staged_node_kill_removes_the_memory_that_workers_reported(
    job: Job, told: bool, tmp_path: Path
) -> None:
    """A loop of one's own has other flags."""
    for node in ('node0', 'node1'):
        (tmp_path / 'memory' / 'run' / node / '0').mkdir(parents=True)
    job.finish_when = lambda: len(job.started(1)) == 2
    fault = StagedFault(StagedAction.KILL_NODE, 1, 2)
    launcher = job.supervisor('1.0=print:iteration 2/', nodes=2, faults=(fault,))
    if told:
        write_memory(job.mailbox, tmp_path / 'memory' / 'run')
    assert launcher.run() == (0 if told else 1)
    assert (tmp_path / 'memory' / 'run' / 'node1').exists() is not told
    assert (tmp_path / 'memory' / 'run' / 'node0').exists()
    if not told:
        assert 'but the program has reported none' in failure(job)
