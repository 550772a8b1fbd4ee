# SPDX-License-Identifier: Apache-2.0
"""What is captured is the training state: all of it, and each element once per replica group."""

import re
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest

from tests.distributed.conftest import Make
from tests.distributed.harness.setups import BF16, EP2, UNTIED, setups
from tests.distributed.probes import training as probes
from tests.support.quick import with_quick

NUM_EXPERTS = 4

SETUPS = setups('inventory')

QUICK = ('etp1-tp2-ep2 virtual-pipeline-2').split()

Inventory = dict[str, Any]


@pytest.mark.parametrize('name', with_quick(SETUPS, *QUICK))
def test_every_element_of_the_state_is_captured_once(name: str, cluster: Make) -> None:
    flags = SETUPS[name]
    moe_layers = {2, 3, 4} if '--moe-layer-freq [0,1,1,1]' in flags else {1, 2, 3, 4}
    job = cluster(*flags.split(), '--train-iters', '1', '--sparse-ckpt-window', '3')
    job.finish(mutation='probes.inventory:write_inventory')
    ranks = probes.read(job.directory, 'inventory', job.ranks)
    for rank in ranks:
        check_operators_partition_the_model(rank)
        check_kinds(rank, moe_layers, local_experts(flags))
        check_buffers(rank, router_bias='expert-bias' in flags)
    check_captured_ranges(ranks)
    check_optimizer_memory(ranks, distributed=BF16 in flags)
    check_plans(ranks, tied=UNTIED not in flags)


def local_experts(flags: str) -> int:
    return NUM_EXPERTS // 2 if EP2 in flags else NUM_EXPERTS


def check_operators_partition_the_model(rank: Inventory) -> None:
    parameters = Counter(p for _, of_it, _ in rank['operators'].values() for p in of_it)
    buffers = Counter(b for _, _, of_it in rank['operators'].values() for b in of_it)
    assert parameters == Counter(rank['parameters'].keys())
    assert buffers == Counter(rank['buffers'].keys())
    assert rank['same'], 'operators hold the tensors of the model, not copies'


def check_kinds(rank: Inventory, moe_layers: set[int], local: int, grouped: bool = False) -> None:
    """Experts are named by their global index, on the rank that upstream places them on."""
    here = sorted(moe_layers & set(rank['layers']))
    first = rank['place']['expert'] * local
    experts = {f'layer{n}.expert{e}' for n in here for e in range(first, first + local)}
    by_kind = defaultdict(set)
    for name, (kind, _, _) in rank['operators'].items():
        by_kind[kind].add(name)
    assert by_kind['expert'] == experts
    assert by_kind['router'] == {f'layer{n}.router' for n in here}
    layers = {f'layer{n}.rest' for n in rank['layers']}
    assert layers <= by_kind['rest'] <= layers | {'embedding', 'head'}
    for name in experts:
        expert = int(name.split('expert')[1]) - first
        for parameter in rank['operators'][name][1]:
            if grouped:
                assert parameter.endswith(f'.weight{expert}')
            else:
                assert f'.local_experts.{expert}.' in parameter


def check_buffers(rank: Inventory, router_bias: bool) -> None:
    """Buffers are captured whole by every rank, in full slots and others."""
    captured = {tensor for _, tensor, part, _, _ in rank['captured'] if part == 'buffer'}
    weights = {tensor for tensor, part, _, _ in rank['weights'] if part == 'buffer'}
    assert captured == weights == rank['buffers'].keys()
    assert any('expert_bias' in name for name in captured) == router_bias
    for _, tensor, part, start, end in rank['captured']:
        if part == 'buffer':
            assert (start, end) == (0, rank['buffers'][tensor])


def check_captured_ranges(ranks: list[Inventory]) -> None:
    """The ranges of all replicas of a parameter tile it, in full slots and others."""
    full, weights, numel = defaultdict(list), defaultdict(list), {}
    for rank in ranks:
        for parameter, size in rank['parameters'].items():
            numel[replica_group(rank, parameter), parameter] = size
        for _, tensor, part, start, end in rank['captured']:
            if part not in ('buffer', 'step'):
                kept = 'master' if part == 'weight' else part  # in fp32 one is the other
                full[replica_group(rank, tensor), tensor, kept].append((start, end))
        for tensor, part, start, end in rank['weights']:
            if part != 'buffer':
                weights[replica_group(rank, tensor), tensor].append((start, end))
    parts = ('master', 'exp_avg', 'exp_avg_sq')
    assert full.keys() == {(*key, part) for key in numel for part in parts}
    assert weights.keys() == numel.keys()
    for (group, tensor, _), ranges in full.items():
        assert_tiles(ranges, numel[group, tensor])
    for key, ranges in weights.items():
        assert_tiles(ranges, numel[key])


def check_optimizer_memory(ranks: list[Inventory], distributed: bool) -> None:
    """No byte of any optimizer tensor is left out; replicated ones are shared out."""
    shares: dict[tuple[int, str], list[Any]] = defaultdict(list)
    sizes = {}
    for number, rank in enumerate(ranks):
        place = rank['place']
        # Without the distributed optimizer these set-ups replicate everything over a stage.
        owner = number if distributed else place['stage']
        for name, size, ranges in rank['state']:
            sizes[owner, name] = size
            if name.endswith('/step'):
                assert ranges == [[0, size]], f'{name}: each rank keeps its own step counts'
            else:
                shares[owner, name] += ranges
    assert shares
    for key, ranges in shares.items():
        assert_tiles(ranges, sizes[key])


def check_plans(ranks: list[Inventory], tied: bool) -> None:
    assert len({rank['plan'] for rank in ranks}) == 1, 'one digest for the plans of all stages'
    for stage in {rank['place']['stage'] for rank in ranks}:
        members = [rank for rank in ranks if rank['place']['stage'] == stage]
        slots = members[0]['slots']
        assert all(rank['slots'] == slots for rank in members)
        planned = Counter(name for slot in slots for name in slot)
        assert planned == Counter({name for rank in members for name in rank['operators']})
    for rank in ranks:
        ends = {'embedding', 'head'} & rank['operators'].keys()
        assert set(rank['tied']) == (ends if tied else set())
        assert set(rank['tied']) <= set(rank['slots'][0])


def replica_group(rank: Inventory, parameter: str) -> tuple[int, ...]:
    """Ranks with the same values of a parameter have the same place in the model."""
    place = rank['place']
    if re.search(r'\.experts\.', parameter) and 'shared_experts' not in parameter:
        return place['stage'], place['expert-tensor'], place['expert']
    return place['stage'], place['tensor']


def assert_tiles(ranges: list[Any], numel: int) -> None:
    """`ranges` cover [0, numel) without gap or overlap."""
    ordered = sorted(ranges)
    assert (ordered[0][0], ordered[-1][1]) == (0, numel)
    assert all(left[1] == right[0] for left, right in pairwise(ordered)), ordered
