# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes example has existing fields and is consistent.

`jobset.schema.json` has the fields and types of the CRD `jobsets.jobset.x-k8s.io` (v1alpha2, JobSet
0.12), without descriptions, status, and parts of a pod that a training job does not use.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moevement_ext.store.__main__ import parse_arguments

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / 'deploy' / 'k8s' / 'jobset.yaml'
SCHEMA = json.loads(Path(__file__).with_name('jobset.schema.json').read_text())['openAPIV3Schema']
TYPES = {
    'object': dict, 'array': list, 'string': str, 'integer': int, 'boolean': bool,
    'number': (int, float),
}  # fmt: skip


def schema_errors(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Errors that a server with strict validation would report."""
    if schema.get('x-kubernetes-int-or-string'):
        if not isinstance(value, int | str):
            yield f'{where}: a number or a text'
        return
    kind = schema.get('type')
    if kind and (not isinstance(value, TYPES[kind]) or (kind == 'integer' and value is True)):
        yield f'{where}: must be of type {kind}'
    elif kind == 'object':
        yield from schema_errors_of_object(value, schema, where)
    elif kind == 'array':
        for number, item in enumerate(value):
            yield from schema_errors(item, schema['items'], f'{where}[{number}]')
    elif 'enum' in schema and value not in schema['enum']:
        yield f'{where}: one of {schema["enum"]}'


def schema_errors_of_object(
    value: dict[str, Any], schema: dict[str, Any], where: str
) -> Iterator[str]:
    missing = set(schema.get('required', ())) - set(value)
    yield from (f'{where}.{name} is missing' for name in sorted(missing))
    known, others = schema.get('properties'), schema.get('additionalProperties')
    for name, item in value.items():
        if known and name in known:
            yield from schema_errors(item, known[name], f'{where}.{name}')
        elif isinstance(others, dict):
            yield from schema_errors(item, others, f'{where}.{name}')
        elif known:
            yield f'{where}.{name}: no such field'


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load(EXAMPLE.read_text('utf-8'))


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return job(jobset)['template']['spec']


def job(jobset: dict[str, Any], name: str = 'nodes') -> dict[str, Any]:
    (found,) = (one for one in jobset['spec']['replicatedJobs'] if one['name'] == name)
    return found['template']['spec']


def test_jobset_fits_the_schema(jobset: dict[str, Any]) -> None:
    assert (jobset['apiVersion'], jobset['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
    assert list(schema_errors(jobset, SCHEMA, 'jobset')) == []


def test_schema_check_finds_mistakes(jobset: dict[str, Any]) -> None:
    broken = copy.deepcopy(jobset)
    broken['spec']['replicatedJobs'][0]['replicas'] = 'two'
    job(broken)['completionmode'] = 'Indexed'
    pod(broken)['containers'][0]['env'][0].pop('name')
    pod(broken)['volumes'][0]['emptyDir']['medium'] = 7
    broken['spec']['failurePolicy']['restartStrategy'] = 'Sometimes'
    found = [line.split(': ')[0].rpartition('.')[2] for line in schema_errors(broken, SCHEMA, '')]
    assert sorted(found) == [
        'completionmode', 'medium', 'name is missing', 'replicas', 'restartStrategy',
    ]  # fmt: skip


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
    first = f'{jobset["metadata"]["name"]}-store-0-0.{network["subdomain"]}'
    assert args.rdzv_endpoint == f'{first}:{serves.port}'


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


def test_container_port_of_the_store_is_the_served_port(jobset: dict[str, Any]) -> None:
    (store,) = job(jobset, 'store')['template']['spec']['containers']
    assert store['ports'] == [{'name': 'store', 'containerPort': 29400}]
    assert '--port=29400' in store['command']
