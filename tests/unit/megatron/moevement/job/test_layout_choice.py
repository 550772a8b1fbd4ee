# SPDX-License-Identifier: Apache-2.0
"""The first fitting layout is taken; if none fits, the error says why for each."""

import re
from collections.abc import Sequence

import pytest

from megatron.moevement.arguments import add_arguments
from megatron.moevement.job.layout_choice import FLAG, LayoutSizes, NodeCapacity, fitted, too_little
from moevement_ext.config import ConfigurationError
from moevement_ext.memory.file_system import GIB
from tests.support.messages import messages
from tools.model.layout import Precision
from tools.model.sizes import held_elements, operator_sizes
from tools.plan.flags import parse_megatron_flags

FLAGS = (
    '--num-layers 4 --num-experts 4 --micro-batch-size 1 --global-batch-size 8 '
    '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'
).split()


def enough(flags: Sequence[str], ranks: int) -> str | None:
    return None


def sizes(ranks: int, layouts: str, *more: str) -> dict[str, int]:
    added = fitted([*FLAGS, *more, FLAG, layouts], ranks, enough)
    return dict(zip(added[::2], map(int, added[1::2]), strict=True))


def test_fitting_flags_are_kept() -> None:
    assert sizes(4, 'ep=4') == sizes(8, 'ep=4') == {}
    assert fitted(FLAGS, 3, enough) == []  # without the flag, no layout is chosen
    assert LayoutSizes(micro_batch=2).misfit(3) is None, 'a batch has samples for all ranks'


def test_flags_that_upstream_refuses_choose_no_layout() -> None:
    refused = ['--help', '--num-layers', 'many']
    assert fitted([*FLAGS, FLAG, 'ep=4', *refused], 3, enough) == []


def test_first_fitting_layout_is_taken() -> None:
    assert sizes(2, 'ep=4;ep=2;pp=2') == {
        '--pipeline-model-parallel-size': 1,
        '--expert-model-parallel-size': 2,
        '--context-parallel-size': 1,
        '--num-distributed-optimizer-instances': 1,
    }
    assert sizes(1, 'ep=2;;pp=1')['--expert-model-parallel-size'] == 1


@pytest.mark.parametrize(('started', 'node', 'layouts', 'fits'), messages('numbers-of-ranks'))
def test_refusal_names_the_nearest_number_of_ranks(
    started: int, node: int, layouts: str, fits: str
) -> None:
    """No process is started in vain: each has a place in the layout."""
    said = f'no layout has a place for each of {started} ranks: .* Start {fits}, or list a layout '
    with pytest.raises(ConfigurationError, match=said):
        fitted([*FLAGS, FLAG, layouts], started, enough, node)


@pytest.mark.parametrize(('ranks', 'layouts', 'why'), messages('layouts'))
def test_error_says_why_no_layout_fits(ranks: int, layouts: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        fitted([*FLAGS, FLAG, layouts], ranks, enough)


@pytest.mark.parametrize('layouts', ['pp', 'pp=0', 'tp=2', 'pp=two'])
def test_invalid_layouts_are_refused(layouts: str) -> None:
    with pytest.raises(ConfigurationError, match='give sizes of pp, ep, cp, instances'):
        sizes(2, layouts)


def test_uneven_pipeline_stages_are_accepted() -> None:
    assert sizes(2, 'pp=2', '--num-layers', '5', '--decoder-first-pipeline-num-layers', '2')


def test_expert_tensor_parallel_size_is_set_only_if_given() -> None:
    dense = ['--tensor-model-parallel-size', '2', '--pipeline-model-parallel-size', '1']
    flag = '--expert-tensor-parallel-size'
    assert flag not in sizes(2, 'ep=1', *dense)
    assert sizes(2, 'ep=2,etp=1', *dense)[flag] == 1
    assert sizes(2, 'ep=1', *dense, flag, '2')[flag] == 2


BIG = (
    '--num-layers 8 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --swiglu '
    '--num-experts 16 --moe-router-topk 2 --seq-length 4096 --max-position-embeddings 4096 '
    '--position-embedding-type rope --normalization RMSNorm --disable-bias-linear '
    '--untie-embeddings-and-output-weights --vocab-size 32000 --micro-batch-size 1 '
    '--global-batch-size 64 --bf16 --use-distributed-optimizer --sparse-ckpt-dir /dev/shm'
).split()
ENOUGH = 1000.0
LAYOUTS = ['pp=1,ep=1', 'pp=2,ep=2', 'ep=8', 'pp=4,ep=2']


def parallel(layout: str) -> list[str]:
    found = dict(item.split('=') for item in layout.split(','))
    flags = ['--pipeline-model-parallel-size', found.get('pp', '1')]
    return [*flags, '--expert-model-parallel-size', found.get('ep', '1')]


def why(flags: Sequence[str], ranks: int, device: int | None, host_gb: float = ENOUGH) -> str:
    node = NodeCapacity(8, device)
    host = ['--sparse-ckpt-host-memory-gb', str(host_gb)]
    return too_little([*BIG, *flags, *host], ranks, node, add_arguments) or ''


def planned(flags: Sequence[str], ranks: int) -> int:
    """Bytes on the device of the fullest rank according to the planner."""
    training = parse_megatron_flags([*BIG, *flags]).training(None, ranks)
    found = []
    for stage in range(training.layout.pipeline):
        held = held_elements(training.model, training.layout, stage)
        operators = operator_sizes(training.model, training.layout, Precision(), stage)
        found.append(6 * held + int(operators.full.sum(axis=0).max()))
    return max(found)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_required_device_memory_agrees_with_the_planner(layout: str) -> None:
    flags, ranks = parallel(layout), 8
    nbytes = planned(flags, ranks)
    assert why(flags, ranks, round(1.03 * nbytes)) == ''
    said = why(flags, ranks, round(0.97 * nbytes))
    assert re.fullmatch(
        r'weights, gradients and optimizer state take [\d.]+ GiB of a device, which has .* GiB',
        said,
    )
    assert float(said.split()[6]) == pytest.approx(nbytes / GIB, rel=0.03)


def test_cpu_job_needs_no_device_memory() -> None:
    assert why(parallel('ep=8'), 8, None) == ''


@pytest.mark.parametrize('flag', ['--use-precision-aware-optimizer', '--optimizer-cpu-offload'])
def test_memory_saving_flags_disable_the_device_check(flag: str) -> None:
    assert why([*parallel('ep=8'), flag], 8, 1) == ''
    assert why(parallel('ep=8'), 8, 1) != ''


def test_context_parallel_ranks_share_the_optimizer_state() -> None:
    flags = [*parallel('ep=2'), '--context-parallel-size', '2']
    said = why(flags, 8, 1)
    assert float(said.split()[6]) == pytest.approx(planned(flags, 8) / GIB, rel=0.03)


def test_node_needs_memory_for_windows_and_replicas() -> None:
    one_node = why(parallel('ep=8'), 8, None, 1.0)
    assert one_node.endswith('--sparse-ckpt-host-memory-gb gives 1.00 GiB')
    two_nodes = why(parallel('ep=8'), 16, None, 1.0)
    taken = [float(text.split()[5]) for text in (one_node, two_nodes)]
    # Half as much on each of two nodes, and twice that with the other's replicas.
    assert taken[1] == pytest.approx(taken[0], rel=0.02)
    assert why(parallel('ep=8'), 8, None, taken[0] + 0.01) == ''


def test_first_fitting_layout_is_taken_or_all_are_named_with_bytes() -> None:
    host = ['--sparse-ckpt-host-memory-gb', str(ENOUGH)]
    flags = [*BIG, *host, *parallel('ep=1'), FLAG, 'ep=2;ep=8']
    device = planned(parallel('ep=4'), 8)

    def too_little_here(given: Sequence[str], ranks: int) -> str | None:
        return too_little(given, ranks, NodeCapacity(8, device), add_arguments)

    assert fitted(flags, 8, too_little_here)[2:4] == ['--expert-model-parallel-size', '8']
    device = planned(parallel('ep=8'), 8) // 2
    with pytest.raises(ConfigurationError, match='a place for each of 8 ranks') as refusal:
        fitted(flags, 8, too_little_here)
    assert len(re.findall(r'ep=\d.*? take [\d.]+ GiB of a device', str(refusal.value))) == 3
