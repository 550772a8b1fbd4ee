# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moevement_ext.config import ConfigurationError
from moevement_ext.launch.environment import check_devices, default_variables_here, variables_here
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.shared_gpu import DEFAULTS
from moevement_ext.replicate.secret import given_in, of_coordinator
from tests.unit.launch.conftest import Job
from tools.lab.launch import Launch

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


def test_workers_have_the_environment_of_torchrun(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    for name in ('CUDA_DEVICE_MAX_CONNECTIONS', 'TORCHDYNAMO_DISABLE'):
        monkeypatch.delenv(name, raising=False)
    job.finish_when = lambda: len(job.started()) == 5
    assert job.run('--flag', 'a value', '3.0=kill', nodes=2, workers_per_node=2) == 0
    starter: Any = job.running._starter
    keeper = starter._keeper
    for rank, restarts, place, node in ((0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 0, 1), (3, 1, 1, 1)):
        attempt = job.attempt(rank, restarts)
        expected = {
            'RANK': str(rank),
            'LOCAL_RANK': str(place),
            'WORLD_SIZE': '4',
            'LOCAL_WORLD_SIZE': '2',
            'GROUP_RANK': str(node),
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(job.running.store.port),
            'TORCHELASTIC_USE_AGENT_STORE': 'True',
            'MOEVEMENT_COORDINATOR': f'127.0.0.1:{keeper.address[1]}',
            'TORCHELASTIC_RESTART_COUNT': str(restarts),
            'MOEVEMENT_NODE': f'node{node}',
            'CUDA_DEVICE_MAX_CONNECTIONS': None,
            'OMP_NUM_THREADS': '3',
            'TORCHDYNAMO_DISABLE': None,  # the program sets it, under any launcher
        }
        assert {name: attempt['env'].get(name) for name in expected} == expected
        assert keeper._secret == of_coordinator(given_in(attempt['env']))
        assert attempt['argv'] == [str(job.program), '--flag', 'a value', '3.0=kill']


@pytest.mark.parametrize(
    ('flags', 'users', 'found'),
    [
        ('--tensor-model-parallel-size 2', None, '1'),
        ('--hidden-size 8 --context-parallel-size=2', None, '1'),
        ('--tensor-model-parallel-size 2', '32', '32'),
        ('--tensor-model-parallel-size 1', None, None),
        ('--pipeline-model-parallel-size 2', '4', '4'),
        ('--overlap-moe-expert-parallel-comm --tensor-model-parallel-size 2', None, None),
        ('--tensor-model-parallel-size 2 --use-megatron-fsdp', None, None),
    ],
)
def test_one_device_connection_only_where_megatron_needs_it(
    job: Job,
    flags: str,
    users: str | None,
    found: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = 'CUDA_DEVICE_MAX_CONNECTIONS'
    monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv(name, users)
    config = LaunchConfig(str(job.program), tuple(flags.split()))
    assert {**default_variables_here(config), **os.environ}.get(name) == found
    launch = Launch(Path('unused'), flags.split(), nodes=1, workers_per_node=1)
    assert launch.environment().get(name) == found


def test_each_worker_has_its_own_gpu(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    config = LaunchConfig(str(job.program), nodes=2, workers_per_node=2)
    check_devices(config)
    chosen = [variables_here(config, rank, 0)['LOCAL_RANK'] for rank in range(4)]
    assert chosen == ['0', '1', '2', '3']
    guest = variables_here(config, 3, 1, host=0, guest=True)
    assert guest.items() >= {'LOCAL_RANK': '1', 'MOEVEMENT_NODE': 'node0'}.items()
    assert guest['NCCL_HOSTID'] == 'guest-node1'
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 3)
    with pytest.raises(ConfigurationError, match='needs 4 GPUs, one for each worker; there are 3'):
        check_devices(config)


def test_workers_sharing_a_gpu_have_distinct_host_ids(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('NCCL_MAX_CTAS', '8')  # set by the user
    monkeypatch.setenv('NCCL_HOSTID', 'the-same-for-all')
    config = LaunchConfig(str(job.program), nodes=2, workers_per_node=2, share_gpu=True)
    check_devices(config)
    everybody = {**default_variables_here(config), **os.environ}
    assert {name: everybody[name] for name in DEFAULTS} == {**DEFAULTS, 'NCCL_MAX_CTAS': '8'}
    ranks = [{**everybody, **variables_here(config, rank, 0)} for rank in range(4)]
    assert {rank['LOCAL_RANK'] for rank in ranks} == {'0'}
    assert len({rank['NCCL_HOSTID'] for rank in ranks}) == 4
    apart = LaunchConfig(str(job.program), nodes=1)
    assert not DEFAULTS.keys() & default_variables_here(apart).keys()
    assert 'NCCL_HOSTID' not in variables_here(apart, 0, 0)


def test_worker_of_another_launcher_can_share_a_gpu(tmp_path: Path) -> None:
    program = tmp_path / 'program.py'
    program.write_text('import json, os, sys; print(json.dumps([sys.argv, dict(os.environ)]))')
    given = {**os.environ, 'RANK': '3', 'LOCAL_RANK': '1', 'NCCL_MAX_CTAS': '8'}
    command = [sys.executable, '-m', 'moevement_ext.launch.shared_gpu', str(program), '-x']
    printed = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
    argv, seen = json.loads(printed)
    assert argv == [str(program), '-x']
    assert (seen['LOCAL_RANK'], seen['NCCL_HOSTID'], seen['NCCL_MAX_CTAS']) == ('0', 'rank3', '8')
    assert seen['NCCL_SOCKET_IFNAME'] == 'lo'
