# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from moevement_ext.config import ConfigurationError
from moevement_ext.local_cluster.config import LaunchConfig
from moevement_ext.local_cluster.environment import check_devices, rank_environment
from tests.unit.local_cluster.conftest import Job

pytestmark = pytest.mark.timeout(60)


def test_workers_find_what_torchrun_gives(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    for name in ('CUDA_DEVICE_MAX_CONNECTIONS', 'TORCHDYNAMO_DISABLE'):
        monkeypatch.delenv(name, raising=False)
    job.finish_when = lambda: len(job.started()) == 5
    assert job.run('--flag', 'a value', '3.0=kill', nodes=2, workers_per_node=2) == 0
    for rank, restarts, place, node in ((0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 0, 1), (3, 1, 1, 1)):
        life = job.life(rank, restarts)
        expected = {
            'RANK': str(rank),
            'LOCAL_RANK': str(place),
            'WORLD_SIZE': '4',
            'LOCAL_WORLD_SIZE': '2',
            'GROUP_RANK': str(node),
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(job.running.store.port),
            'TORCHELASTIC_USE_AGENT_STORE': 'True',
            'TORCHELASTIC_RESTART_COUNT': str(restarts),
            'MOEVEMENT_NODE': f'node{node}',
            'CUDA_DEVICE_MAX_CONNECTIONS': '1',
            'OMP_NUM_THREADS': '3',
            'TORCHDYNAMO_DISABLE': '1',
        }
        assert {name: life['env'].get(name) for name in expected} == expected
        assert life['argv'] == [str(job.program), '--flag', 'a value', '3.0=kill']


def test_each_worker_has_a_gpu_of_its_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    config = LaunchConfig(str(job.program), nodes=2, workers_per_node=2)
    check_devices(config)
    chosen = [rank_environment(config, rank, 0)['LOCAL_RANK'] for rank in range(4)]
    assert chosen == ['0', '1', '2', '3']
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 3)
    with pytest.raises(ConfigurationError, match='needs 4 GPUs, one for each worker; there are 3'):
        check_devices(config)
