# SPDX-License-Identifier: Apache-2.0
"""A job is launched with, and hurt in the ways, that it says; real processes that train nothing."""

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from moevement_ext.events import EventLog, WorkerStarted
from moevement_ext.launch.launcher_events import (
    FILE,
    JobFailed,
    Journal,
    WorkerEnded,
    WorkerLaunched,
)
from tools.lab.job import Job, Kind
from tools.lab.launch import Launch
from tools.lab.local_cluster import LocalCluster
from tools.lab.programs import LabError
from tools.lab.torchrun import Agents, ForkingAgents

pytestmark = pytest.mark.timed
WAIT_S = 120.0
"""At most for something that comes at once."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Two workers on each of two nodes, of which the first has memory."""
    program = tmp_path / 'program.py'
    program.write_text('import time\ntime.sleep(600)\n')
    window = tmp_path / 'memory' / 'node0' / '0' / 'a.window'
    window.parent.mkdir(parents=True)
    window.write_bytes(bytes(100))
    launch = Launch(tmp_path / 'job', [], 2, 2, max_restarts=9, program_file=str(program))
    with Job(launch, memory=tmp_path / 'memory') as job:
        yield job


def test_a_job_has_all_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or none: it ends, and the error has the end of the log."""
    launcher = Mock(deaths=())
    launcher.exit_status.return_value, launcher.tail.return_value = None, 'its last words'
    launcher.pids.side_effect = itertools.chain([{0: 1}], itertools.repeat({0: 1, 1: 2}))
    with Job(Launch(tmp_path / 'a', [], 2, 1), lambda launch: launcher) as job:
        assert job.pids() == [1, 2]
    launcher.reset_mock()
    launcher.pids.side_effect = itertools.repeat({0: 1})
    monkeypatch.setattr('tools.lab.job._STALLED_S', 0)
    with pytest.raises(LabError, match='1 of 2 workers have started in 0 s') as caught:
        Job(Launch(tmp_path / 'b', [], 2, 1), lambda launch: launcher).__enter__()
    assert caught.value.tail == 'its last words'
    launcher.end.assert_called_once_with()


def test_faults_of_each_kind_are_injected(job: Job, tmp_path: Path) -> None:
    workers = [psutil.Process(pid) for pid in job.pids()]
    for kind, why in ((Kind.NODE, 'node1 has no memory to lose'), (Kind.AGENT, 'only a job under')):
        with pytest.raises(LabError, match=why):
            job.hurt(kind, [2])
    assert workers[2].status() != psutil.STATUS_STOPPED
    job.hurt(Kind.STUCK, [3])
    assert workers[3].is_running()
    assert (job.folder / f'stall.{workers[3].pid}').exists()
    job.hurt(Kind.STOP, [2])
    while workers[2].status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    job.hurt(Kind.NODE, [1, 0])
    assert not psutil.wait_procs(workers[:2], timeout=WAIT_S)[1]
    assert not (tmp_path / 'memory' / 'node0').exists()
    job.hurt(Kind.WHOLE, range(4))
    assert not psutil.wait_procs(workers, timeout=WAIT_S)[1]


def test_node_is_lost_for_good(tmp_path: Path) -> None:
    """Its ranks go on beside those of another node."""
    window = tmp_path / 'memory' / 'run' / 'node1' / 'a.window'
    window.parent.mkdir(parents=True)
    window.touch()
    program = tmp_path / 'program.py'
    program.write_text('import time\ntime.sleep(600)\n')
    flags = ['--sparse-ckpt-dir', str(tmp_path / 'memory'), '--sparse-ckpt-run-id', 'run']
    launch = Launch(tmp_path / 'job', flags, 2, 1, 9, program_file=str(program), guests=True)
    with Job(launch, memory=tmp_path / 'memory' / 'run') as job:
        lost = job.pids()[1]
        job.hurt(Kind.AWAY, [1])
        until = time.monotonic() + WAIT_S
        while job.pids()[1] == lost and time.monotonic() < until:
            time.sleep(0.05)
        assert job.ranks_beside(0) == [0, 1]
        assert not window.exists()


def launch(tmp_path: Path, **fields: int) -> Launch:
    return Launch(tmp_path, ['--bf16'], **{'nodes': 2, 'workers_per_node': 2, **fields})


def test_armed_fault_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MOEVEMENT_FAIL_AT', '0:1:step')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3')
    monkeypatch.setenv('ANYTHING', 'else')
    environment = launch(tmp_path)._replace(variables={'OWN': '1'}).environment()
    assert 'MOEVEMENT_FAIL_AT' not in environment
    assert (environment['CUDA_VISIBLE_DEVICES'], environment['OMP_NUM_THREADS']) == ('', '1')
    assert (environment['ANYTHING'], environment['OWN']) == ('else', '1')


def test_job_on_a_gpu_runs_over_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3')
    cpu = launch(tmp_path)
    gpu = cpu._replace(flags=[*cpu.flags, '--distributed-backend', 'gloo'], share_gpu=True)
    assert gpu.environment()['CUDA_VISIBLE_DEVICES'] == '3'
    assert ' '.join(gpu.program()[1:]) == (  # the last value counts
        '--bf16 --distributed-backend gloo --distributed-backend nccl '
        '--disable-gloo-process-groups --deterministic-mode'
    )
    assert cpu.program()[1:] == ['--bf16']
    for job in (gpu, cpu):
        command = LocalCluster(job).command()
        end = command.index('--')
        assert ('--share-gpu' in command[:end]) == job.share_gpu
        assert command[end + 1 :] == job.program()


def test_workers_of_agents_share_a_gpu_too(tmp_path: Path) -> None:
    program = tmp_path / 'program.py'
    program.write_text(
        'import os, sys\n'
        "print('as', *(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'NCCL_HOSTID')), sys.argv[1])"
    )
    job = launch(tmp_path, nodes=1)._replace(share_gpu=True, program_file=str(program))
    agents = Agents(job)
    agents.start()
    try:
        while agents.exit_status() is None:
            time.sleep(0.1)
    finally:
        agents.end()
    printed = agents.log_of(0).read_text()
    assert agents.exit_status() == 0, printed
    assert '[rank0]: as 0 0 rank0 --bf16' in printed
    assert '[rank1]: as 1 0 rank1 --bf16' in printed


def test_events_of_the_local_launcher_are_decoded(tmp_path: Path) -> None:
    """Also while it writes the next line, and of the next launcher after that."""
    cluster = LocalCluster(launch(tmp_path))
    assert (cluster.pids(), cluster.deaths, cluster.given_up) == ({}, [], '')
    journal = Journal(tmp_path / 'logs', lambda event: None)
    journal(WorkerLaunched(1, 71, 0, was_spare=False))
    journal(WorkerEnded(1, 71, -9))
    with (tmp_path / 'logs' / FILE).open('ab') as file:
        file.write(b'{"time":1.5,"event":"worker_en')
    assert cluster.pids() == {1: 71}
    journal.close()
    journal = Journal(tmp_path / 'logs', lambda event: None)
    journal(WorkerLaunched(1, 72, 1, was_spare=True))
    journal(WorkerEnded(0, 70, 3))
    journal(JobFailed('rank 0 (pid 70) ended with exit status 3 too often; its last lines:\n x'))
    assert cluster.pids() == {1: 72}
    assert [(death.rank, death.pid, death.code) for death in cluster.deaths] == [
        (1, 71, None),
        (0, 70, 3),
    ]
    assert all(time.time() - 60 < death.time <= time.time() for death in cluster.deaths)
    assert cluster.given_up.endswith('exit status 3 too often; its last lines:')
    assert str(cluster.deaths[1]) == 'rank 0 (pid 70) ended with exit status 3'


def test_the_tail_is_that_of_the_worker_that_failed_first(tmp_path: Path) -> None:
    agents = Agents(launch(tmp_path))
    (tmp_path / 'logs').mkdir()
    agents.log_of(0).write_text('agent\n[rank1]: fine\n')
    agents.log_of(2).write_text('[rank2]: Traceback\n[rank3]: waits\n[rank2]: ValueError\n')
    assert agents.tail() == '[rank2]: Traceback\n[rank2]: ValueError'
    agents.log_of(2).write_text('[rank2]: waits\n')
    assert agents.tail() == 'agent\n[rank1]: fine\n\n[rank2]: waits'


def test_forks_of_agents_are_known_by_their_events(tmp_path: Path) -> None:
    agents = ForkingAgents(launch(tmp_path))
    assert agents.pids() == {}
    EventLog(str(tmp_path / 'events'), 1).emit(WorkerStarted())
    assert agents.pids() == {1: os.getpid()}
