# SPDX-License-Identifier: Apache-2.0
"""No sample is lost or used twice when a job goes on with another number of data-parallel ranks.

Each rank's real loader says which samples it gives to which iteration. What counts is the last life
that began an iteration; the sum over all of them is that of plain Megatron without a failure.
"""

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.distributed.conftest import Make
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_elastic import MODEL, ONE, RESTART, THREE, Layout, again, resharded

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

BATCH, ITERATIONS = 12, 12
FLAGS = [*MODEL, '--global-batch-size', str(BATCH)]
PROBE = 'probes.samples:record'
FOUR, THREE_RANKS = Layout(4, sharded=True), Layout(3, sharded=True)
LOADERS = {
    'in order': [],
    'in order, with processes': ['--num-workers', '1'],
    'shuffled': ['--dataloader-type', 'cyclic', '--no-data-sharding'],
}


def killed(cluster: Make, *flags: str) -> Cluster:
    job = cluster(*FLAGS, *FOUR.flags(), *RESTART, *flags)
    assert -9 in job.run(fail_at='0:9:forward', mutation=PROBE)
    return job


def accepted(lives: Sequence[Cluster]) -> dict[int, Counter[int]]:
    """Samples of each iteration over all ranks, in the last life that began it."""
    found: dict[int, Counter[int]] = {}
    for life in lives:
        of_life: dict[int, Counter[int]] = {}
        for path in life.directory.glob('samples-*.jsonl'):
            for line in path.read_text().splitlines():
                iteration, samples = json.loads(line)
                of_life.setdefault(iteration, Counter()).update(samples)
        found |= of_life
    return found


@pytest.mark.parametrize('window', [ONE, THREE], ids=['window 1', 'window 3'])
@pytest.mark.parametrize('loader', LOADERS)
def test_every_sample_is_trained_on_once(loader: str, window: list[str], cluster: Make) -> None:
    """Four ranks deal a batch otherwise than three."""
    given = LOADERS[loader]
    job = killed(cluster, *window, *given)
    after = again(job, cluster, THREE_RANKS, '--global-batch-size', str(BATCH), *window, *given)
    after.finish(timeout_s=300.0, mutation=PROBE)
    assert resharded(after).dense_at >= 4
    fault_free = cluster(*FLAGS, *FOUR.flags(), *given, sparse=False)
    fault_free.finish(timeout_s=300.0, mutation=PROBE)
    found, expected = accepted([job, after]), accepted([fault_free])
    assert {len(ranks) for ranks in (found, expected)} == {ITERATIONS}
    assert {sum(samples.values()) for samples in expected.values()} == {BATCH}
    assert found == expected
    assert set(sum(found.values(), Counter()).values()) == {1}


@pytest.mark.mutation
def test_a_wrong_position_of_the_data_is_counted(cluster: Make) -> None:
    was, now = Layout(1), Layout(1, sharded=True)
    job = cluster(*FLAGS, *was.flags(), *RESTART, *ONE, ranks=1)
    assert -9 in job.run(fail_at='0:9:forward', mutation=PROBE)
    after = again(job, cluster, now, '--global-batch-size', str(BATCH), *ONE)
    broken = 'mutations.elastic:data_go_on_where_so_many_ranks_would_be'
    after.finish(timeout_s=300.0, mutation=f'{PROBE},{broken}')
    counted = sum(accepted([job, after]).values(), Counter())
    assert set(counted.values()) == {1, 2}
