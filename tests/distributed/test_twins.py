# SPDX-License-Identifier: Apache-2.0
"""All workers die, a node is lost: a data-parallel peer is the only source of its windows."""

import shutil

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster

pytestmark = pytest.mark.thorough


FLAGS = (
    '--bf16 --untie-embeddings-and-output-weights --hidden-dropout 0.1 --train-iters 10 '
    '--use-distributed-optimizer --num-distributed-optimizer-instances 2'
).split()
"""Each shard of the state is in two instances of the optimizer, one on each node."""
PROTECTED = '--sparse-ckpt-window 3 --sparse-ckpt-replicas 1'.split()
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


def test_twin_is_the_only_source_of_a_window(cluster: Make, reference: Reference) -> None:
    job = lose_a_node(cluster(*FLAGS, *PROTECTED))
    assert differences(reference(*FLAGS, stand_in=OWN), read_digest(job)) == []
    assert job.events_of(Recovered, job.ranks - 1)
    output = job.output(attempt=0)
    assert 'replicas: 1, 2 of this node captured by data-parallel peers anyway' in output
    assert 'has a copy fewer' not in output
    assert 'from: rank 0' in job.output(attempt=1), 'whose node has what the last rank goes on from'


@pytest.mark.mutation
def test_using_the_own_part_of_a_twin_changes_the_bits(cluster: Make, reference: Reference) -> None:
    """With its random numbers the bits are others."""
    job = lose_a_node(cluster(*FLAGS, *PROTECTED), ',mutations.whole_job:part_of_the_twin')
    assert differences(reference(*FLAGS, stand_in=OWN), read_digest(job)) != []


def test_stage_recovers_from_a_twin(cluster: Make, reference: Reference) -> None:
    """One worker dies with the memory of its node; its stage replays, with its peer's copy."""
    flags = [*FLAGS, '--pipeline-model-parallel-size', '2']
    job = cluster(*flags, *PROTECTED, nodes=4)
    assert job.survive(fail_at='1:8:forward', wipe=[1]) == {1: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    (recovered,) = job.events_of(Recovered, rank=1)
    assert (recovered.scope, recovered.stages) == ('localized', [0])
    assert 'captured by data-parallel peers anyway' in job.output(attempt=0)
