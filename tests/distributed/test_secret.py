# SPDX-License-Identifier: Apache-2.0
"""A launcher that gives its workers no secret, as torchrun does."""

from collections.abc import Callable

import pytest

from moevement_ext.events import NextTier
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import SETTLED

FLAGS = (
    '--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 '
    '--expert-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 12'
).split()


@pytest.mark.parametrize('node_lost', [pytest.param(False, marks=pytest.mark.thorough), True])
def test_nodes_keep_the_drawn_secret(
    cluster: Callable[..., Cluster], reference: Callable[..., dict], node_lost: bool
) -> None:
    """A replacement there knows it; one on another node makes all start again."""
    job = cluster(*FLAGS, '--sparse-ckpt-window', '3', *SETTLED)
    job.gives_secret = False
    starts = job.survive(fail_at='2:8:forward,3:8:forward', wipe=[1] if node_lost else [])
    assert differences(reference(*FLAGS), read_digest(job)) == []
    tiers = [event for rank in range(job.ranks) for event in job.events_of(NextTier, rank)]
    assert bool(tiers) == node_lost and set(starts) == ({0, 1, 2, 3} if node_lost else {2, 3})
    assert all('does not know the secret' in event.reason for event in tiers[:2])
    assert not job.memory.exists(), 'host memory is given back at a clean exit'
