# SPDX-License-Identifier: Apache-2.0
"""Frozen operators cost no weight gradient in a replay, and pass on the same input gradients."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.harness.cluster import Cluster
from tests.distributed.probes import training as probes

pytestmark = pytest.mark.thorough

WINDOW = 4
MICRO_BATCHES = 4
LAYOUT = (
    '--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 '
    '--untie-embeddings-and-output-weights --train-iters 10'
).split()


def replayed_iterations(
    cluster: Callable[..., Cluster], probe: str, *flags: str
) -> list[dict[str, Any]]:
    """Counts of every iteration that two ranks replay after the job was killed."""
    window = ['--sparse-ckpt-window', str(WINDOW), *flags]
    job = cluster(*LAYOUT, *window, '--global-batch-size', '4', ranks=2)
    assert -9 in job.run(fail_at='0:9:forward')
    job.finish(mutation=f'probes.gradients:{probe}')
    ranks = probes.read(job.directory, 'replayed', job.ranks)
    assert [len(rank) for rank in ranks] == [WINDOW - 1] * job.ranks
    return [iteration for rank in ranks for iteration in rank]


def replayed_by_lost_stage(cluster: Callable[..., Cluster]) -> list[dict[str, Any]]:
    """Counts of every iteration that the first stage replays alone after its worker was killed."""
    job = cluster(*LAYOUT, '--sparse-ckpt-window', str(WINDOW), '--global-batch-size', '4', ranks=2)
    job.survive(fail_at='0:9:forward', mutation='probes.gradients:count_weight_gradients')
    (iterations,) = probes.read(job.directory, 'replayed', 1)
    assert len(iterations) == WINDOW - 1
    return iterations


def by_operator(iteration: dict[str, Any], counts: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, count in iteration[counts].items():
        total[iteration['operators'][name]] += count
    return total


@pytest.mark.thorough
def test_frozen_operators_compute_no_weight_gradient(
    cluster: Callable[..., Cluster],
) -> None:
    replayed = replayed_iterations(cluster, 'count_weight_gradients')
    assert kinds_without_gradient(replayed) == {'expert', 'router', 'rest', 'head'}


def test_frozen_operators_compute_none_in_a_localized_replay(
    cluster: Callable[..., Cluster],
) -> None:
    assert kinds_without_gradient(replayed_by_lost_stage(cluster)) == {'expert', 'router', 'rest'}


def kinds_without_gradient(replayed: list[dict[str, Any]]) -> set[str]:
    """Kinds of the frozen operators, after a check that these and no others cost one product."""
    kinds = set()
    for iteration in replayed:
        names = set(iteration['operators'].values())
        frozen = set(iteration['frozen']) & names
        assert frozen, 'something is frozen in every replayed iteration'
        calls, products = by_operator(iteration, 'calls'), by_operator(iteration, 'products')
        once = {name for name in calls if products[name] == calls[name]}
        twice = {name for name in calls if products[name] == 2 * calls[name]}
        assert once | twice == calls.keys()
        assert once == frozen & calls.keys()
        assert set(iteration['calls'].values()) == {MICRO_BATCHES}
        kinds |= {name.rstrip('0123456789').split('.')[-1] for name in once}
        assert iteration['accumulated'] == dict.fromkeys(
            (name for name, owner in iteration['operators'].items() if owner not in frozen),
            MICRO_BATCHES,
        )
    return kinds


def test_counts_show_when_nothing_is_frozen(cluster: Callable[..., Cluster]) -> None:
    for iteration in replayed_iterations(cluster, 'count_weight_gradients_without_freezing'):
        calls, products = iteration['calls'], iteration['products']
        assert products == {name: 2 * count for name, count in calls.items()}
        assert iteration['accumulated'] == dict.fromkeys(iteration['operators'], MICRO_BATCHES)


@pytest.mark.parametrize(
    'flags',
    [
        pytest.param('', marks=pytest.mark.thorough),
        pytest.param('--bf16 --untie-embeddings-and-output-weights', marks=pytest.mark.thorough),
        '--bf16 --use-distributed-optimizer --moe-shared-expert-intermediate-size 32',
    ],
    ids=['fp32-tied', 'bf16', 'bf16-distributed-tied-shared-expert'],
)
def test_input_gradients_do_not_depend_on_what_is_frozen(
    flags: str, cluster: Callable[..., Cluster]
) -> None:
    """Between all layers (where stages are cut) and at the embedding, whatever is frozen."""
    job = cluster(*flags.split(), '--train-iters', '1', ranks=1, nodes=1)
    job.finish(mutation='probes.gradients:compare_input_gradients')
    (digests,) = probes.read(job.directory, 'gradients', 1)
    active, other = digests.pop('none'), digests.pop('other data')
    assert len(set(active)) == 5
    assert not set(active) & set(other), 'the digests tell gradients apart'
    assert digests == dict.fromkeys(digests, active)
