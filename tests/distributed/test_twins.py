# SPDX-License-Identifier: Apache-2.0
"""All workers die, a node is lost: a data-parallel peer is the only source of its windows."""

import shutil
from collections.abc import Callable

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster

DROPOUT = '--bf16 --untie-embeddings-and-output-weights --hidden-dropout 0.1 --train-iters 10'
PLAIN = DROPOUT.split()
"""Two peers that hold the same."""
INSTANCES = f'{DROPOUT} --use-distributed-optimizer --num-distributed-optimizer-instances 2'.split()
"""Each shard of the state is in two instances of the optimizer, one on each node."""
OWN = 'mutations.upstream_variants:random_numbers_of_each_rank'
"""They draw other random numbers."""
LOST = 1


def lose_a_node(job: Cluster, mutation: str = '') -> Cluster:
    """To the end of training, past the death of all and the loss of a node's memory."""
    assert -9 in job.run(fail_at='0:8:forward', mutation=OWN)
    assert [*job.node_memory(0).rglob('stub-*/window-*.window')]
    replicas = [*job.node_memory(0).rglob('window-*.window')]
    owners = {int(path.parent.name) for path in replicas if path.parent.name.isdecimal()}
    per_node = job.ranks // job.nodes
    assert owners == {*range(per_node)}, 'nothing else has windows of the other node'
    shutil.rmtree(job.node_memory(LOST))
    job.finish(mutation=OWN + mutation)
    return job


@pytest.mark.parametrize(
    ('flags', 'ranks'),
    [(PLAIN, 2), pytest.param(INSTANCES, 4, marks=pytest.mark.thorough)],
    ids=['plain', 'instances'],
)
def test_a_peer_is_the_only_source(
    flags: list[str], ranks: int, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = lose_a_node(
        cluster(*flags, '--sparse-ckpt-window', '3', '--sparse-ckpt-replicas', '1', ranks=ranks)
    )
    assert differences(reference(*flags, ranks=ranks, stand_in=OWN), read_digest(job)) == []
    assert job.events_of(Recovered, ranks - 1)
    output = job.output(life=0)
    assert f'replicas: 1, {ranks // 2} of this node held by data-parallel peers anyway' in output
    assert f'from rank {ranks // 2 - 1}' in job.output(life=1), 'what the last rank goes on from'


def test_what_is_a_peers_own_is_not_taken_for_that_of_the_lost_rank(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """With its random numbers the bits are others."""
    job = cluster(*PLAIN, '--sparse-ckpt-window', '3', '--sparse-ckpt-replicas', '1', ranks=2)
    lose_a_node(job, mutation=',mutations.whole_job:part_of_the_twin')
    assert differences(reference(*PLAIN, ranks=2, stand_in=OWN), read_digest(job)) != []
