# SPDX-License-Identifier: Apache-2.0
"""Layouts that exceed the memory are skipped; the required bytes agree with the planner.

The planner (`tools.plan`) counts by operator; here it is upstream's arithmetic.
"""

import re
from collections.abc import Sequence

import pytest

from megatron.moevement.arguments import add_arguments
from megatron.moevement.job.layout_choice import FLAG, fitted
from megatron.moevement.seams.layout_memory import NodeCapacity, too_little
from moevement_ext.config import ConfigurationError
from moevement_ext.memory.file_system import GIB
from tools.model.layout import Precision
from tools.model.sizes import held_elements, operator_sizes
from tools.plan.flags import parse_megatron_flags

MODEL = (
    '--num-layers 8 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --swiglu '
    '--num-experts 16 --moe-router-topk 2 --seq-length 4096 --max-position-embeddings 4096 '
    '--position-embedding-type rope --normalization RMSNorm --disable-bias-linear '
    '--untie-embeddings-and-output-weights --vocab-size 32000 --micro-batch-size 1 '
    '--global-batch-size 64 --bf16 --use-distributed-optimizer --sparse-ckpt-dir /dev/shm'
).split()
ENOUGH = 1000.0
LAYOUTS = ['pp=1,ep=1', 'pp=2,ep=2', 'ep=8', 'pp=4,ep=2']


def sizes(layout: str) -> list[str]:
    found = dict(item.split('=') for item in layout.split(','))
    flags = ['--pipeline-model-parallel-size', found.get('pp', '1')]
    return [*flags, '--expert-model-parallel-size', found.get('ep', '1')]


def why(flags: Sequence[str], ranks: int, device: int | None, host_gb: float = ENOUGH) -> str:
    node = NodeCapacity(8, device)
    host = ['--sparse-ckpt-host-memory-gb', str(host_gb)]
    return too_little([*MODEL, *flags, *host], ranks, node, add_arguments) or ''


def planned(flags: Sequence[str], ranks: int) -> int:
    """Bytes on the device of the fullest rank according to the planner."""
    training = parse_megatron_flags([*MODEL, *flags]).training(None, ranks)
    found = []
    for stage in range(training.layout.pipeline):
        held = held_elements(training.model, training.layout, stage)
        operators = operator_sizes(training.model, training.layout, Precision(), stage)
        found.append(6 * held + int(operators.full.sum(axis=0).max()))
    return max(found)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_required_device_memory_agrees_with_the_planner(layout: str) -> None:
    flags, ranks = sizes(layout), 8
    nbytes = planned(flags, ranks)
    assert why(flags, ranks, round(1.03 * nbytes)) == ''
    said = why(flags, ranks, round(0.97 * nbytes))
    assert re.fullmatch(
        r'weights, gradients and optimizer state take [\d.]+ GiB of a device, which has .* GiB',
        said,
    )
    assert float(said.split()[6]) == pytest.approx(nbytes / GIB, rel=0.03)


def test_cpu_job_needs_no_device_memory() -> None:
    assert why(sizes('ep=8'), 8, None) == ''


@pytest.mark.parametrize('flag', ['--use-precision-aware-optimizer', '--optimizer-cpu-offload'])
def test_memory_saving_flags_disable_the_device_check(flag: str) -> None:
    assert why([*sizes('ep=8'), flag], 8, 1) == ''
    assert why(sizes('ep=8'), 8, 1) != ''


def test_context_parallel_ranks_share_the_optimizer_state() -> None:
    flags = [*sizes('ep=2'), '--context-parallel-size', '2']
    said = why(flags, 8, 1)
    assert float(said.split()[6]) == pytest.approx(planned(flags, 8) / GIB, rel=0.03)


def test_node_needs_memory_for_windows_and_replicas() -> None:
    one_node = why(sizes('ep=8'), 8, None, 1.0)
    assert one_node.endswith('--sparse-ckpt-host-memory-gb gives 1.00 GiB')
    two_nodes = why(sizes('ep=8'), 16, None, 1.0)
    taken = [float(text.split()[5]) for text in (one_node, two_nodes)]
    # Half as much on each of two nodes, and twice that with the other's replicas.
    assert taken[1] == pytest.approx(taken[0], rel=0.02)
    assert why(sizes('ep=8'), 8, None, taken[0] + 0.01) == ''


def test_first_fitting_layout_is_taken_or_all_are_named_with_bytes() -> None:
    host = ['--sparse-ckpt-host-memory-gb', str(ENOUGH)]
    flags = [*MODEL, *host, *sizes('ep=1'), FLAG, 'ep=2;ep=8']
    device = planned(sizes('ep=4'), 8)

    def too_little_here(given: Sequence[str], ranks: int) -> str | None:
        return too_little(given, ranks, NodeCapacity(8, device), add_arguments)

    assert fitted(flags, 8, too_little_here)[1][2:4] == ['--expert-model-parallel-size', '8']
    device = planned(sizes('ep=8'), 8) // 2
    with pytest.raises(ConfigurationError, match='no layout fits 8 ranks') as refusal:
        fitted(flags, 8, too_little_here)
    assert len(re.findall(r'ep=\d.*? take [\d.]+ GiB of a device', str(refusal.value))) == 3
