# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes example is consistent, and its programs take its flags."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.store import parse_arguments

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / 'deploy' / 'k8s' / 'jobset.yaml'


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load(EXAMPLE.read_text('utf-8'))


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return job(jobset)['template']['spec']


def job(jobset: dict[str, Any], name: str = 'nodes') -> dict[str, Any]:
    (found,) = (one for one in jobset['spec']['replicatedJobs'] if one['name'] == name)
    return found['template']['spec']


def launched(jobset: dict[str, Any]) -> tuple[argparse.Namespace, list[str]]:
    """Parsed arguments of the agent, and the flags of the program."""
    from moevement_ext.launch.torchrun import parse

    (container,) = pod(jobset)['containers']
    shell, option, script, name = container['command']
    assert (shell, option, name) == ('bash', '-c', 'torchrun')
    words = script.replace('"$NODE_RANK"', '3').split()
    assert words[:3] == ['exec', 'moevement', 'torchrun']
    assert words[-2:] == ['pretrain_gpt.py', '"$@"']
    return parse([*words[3:-1], *container['args']]), container['args']


def test_node_counts_and_store_endpoint_agree(jobset: dict[str, Any]) -> None:
    args, _ = launched(jobset)
    one, spec = jobset['spec']['replicatedJobs'][0], job(jobset)
    assert (spec['completionMode'], one['replicas']) == ('Indexed', 1)
    assert spec['parallelism'] == spec['completions'] == int(args.nnodes)
    (container,) = pod(jobset)['containers']
    assert container['resources']['limits']['nvidia.com/gpu'] == int(args.nproc_per_node)
    network = jobset['spec']['network']
    assert network['enableDNSHostnames'] is True
    assert args.rdzv_conf == 'rank=3'
    (store,) = job(jobset, 'store')['template']['spec']['containers']
    serves = parse_arguments(store['command'][3:])
    assert serves.host == '$(POD_IP)'
    assert store['ports'] == [{'name': 'store', 'containerPort': serves.port}]
    first = f'{jobset["metadata"]["name"]}-store-0-0.{network["subdomain"]}'
    assert args.rdzv_endpoint == f'{first}:{serves.port}'


def test_a_refused_flag_fails_the_job(jobset: dict[str, Any]) -> None:
    (rule,) = job(jobset)['podFailurePolicy']['rules']
    (container,) = pod(jobset)['containers']
    assert rule['action'] == 'FailJob' and pod(jobset)['restartPolicy'] == 'Never'
    codes = {'containerName': container['name'], 'operator': 'In', 'values': [EXIT_USER_ERROR]}
    assert rule['onExitCodes'] == codes
    (failed,) = jobset['spec']['failurePolicy']['rules']
    assert failed == {'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}


def test_store_runs_on_a_node_without_training(jobset: dict[str, Any]) -> None:
    """It ends with the job that it serves."""
    store = job(jobset, 'store')['template']
    assert store['metadata'] != job(jobset)['template']['metadata']
    assert (
        store['spec']['affinity'] == pod(jobset)['affinity']
    )  # both avoid nodes with training pods
    assert jobset['spec']['successPolicy'] == {
        'operator': 'All',
        'targetReplicatedJobs': ['nodes'],
    }


def test_data_cache_and_checkpoints_are_on_writable_volumes(jobset: dict[str, Any]) -> None:
    (container,) = pod(jobset)['containers']
    flags = dict(flag.partition('=')[::2] for flag in container['args'])
    writable = [m['mountPath'] for m in container['volumeMounts'] if not m.get('readOnly')]
    for name in ('--data-cache-path', '--save'):
        assert any(Path(flags[name]).is_relative_to(place) for place in writable)


def test_windows_fit_the_memory_limit_of_the_pod(jobset: dict[str, Any]) -> None:
    (container,) = pod(jobset)['containers']
    (mount,) = (m for m in container['volumeMounts'] if m['mountPath'] == '/dev/shm')
    volumes = {volume['name']: volume for volume in pod(jobset)['volumes']}
    memory = volumes[mount['name']]['emptyDir']
    assert memory['medium'] == 'Memory'
    limits = (memory['sizeLimit'], container['resources']['limits']['memory'])
    size, limit = (int(text.removesuffix('Gi')) for text in limits)
    assert 0 < size < limit
    assert {m['name'] for m in container['volumeMounts']} == set(volumes)
    (name,) = (entry for entry in container['env'] if entry['name'] == 'MOEVEMENT_NODE')
    assert name['valueFrom']['fieldRef']['fieldPath'] == 'spec.nodeName'


def test_program_accepts_the_flags(jobset: dict[str, Any]) -> None:
    from megatron.training.arguments import add_megatron_arguments

    from megatron.moevement.arguments import add_arguments

    args, flags = launched(jobset)
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    parsed, unknown = parser.parse_known_args(flags)
    assert unknown == []
    assert parsed.sparse_ckpt
    ranks = int(args.nnodes) * int(args.nproc_per_node)
    assert ranks % (parsed.pipeline_model_parallel_size * parsed.expert_model_parallel_size) == 0


def test_pod_monitor_scrapes_the_port_of_each_rank(jobset: dict[str, Any]) -> None:
    monitor = yaml.safe_load((EXAMPLE.parent / 'podmonitor.yaml').read_text('utf-8'))
    (container,) = pod(jobset)['containers']
    (flag,) = (flag for flag in container['args'] if flag.startswith('--sparse-ckpt-metrics='))
    workers = int(launched(jobset)[0].nproc_per_node)
    first = int(flag.partition('=')[2])
    ports = {one['name']: one['containerPort'] for one in container['ports']}
    assert list(ports.values()) == [first + place for place in range(workers)]
    assert [one['port'] for one in monitor['spec']['podMetricsEndpoints']] == list(ports)
    labels = job(jobset)['template']['metadata']['labels']
    assert monitor['spec']['selector']['matchLabels'].items() <= labels.items()
