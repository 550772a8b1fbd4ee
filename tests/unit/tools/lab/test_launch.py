# SPDX-License-Identifier: Apache-2.0
"""What jobs are launched with, and what their launchers say of them."""

import os
import time
from pathlib import Path

import pytest

from moevement_ext.events import EventLog, WorkerStarted
from moevement_ext.launch.launcher_events import (
    FILE,
    JobFailed,
    Journal,
    WorkerEnded,
    WorkerLaunched,
)
from tools.lab.launch import Launch
from tools.lab.local_cluster import LocalCluster
from tools.lab.torchrun import Agents, ForkingAgents

pytestmark = pytest.mark.timed


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
