# SPDX-License-Identifier: Apache-2.0
"""A launcher that gives the workers of several nodes no secret, as torchrun does."""

from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.faults import SETTLED
from tests.distributed.test_whole_job_recovery import BASE


def test_nodes_without_a_secret_recover_the_whole_job_from_their_own_memory(
    cluster: Make, reference: Reference
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3', *SETTLED)
    job.gives_secret = False
    assert set(job.survive(fail_at='2:8:forward')) == {0, 1, 2, 3}
    assert differences(reference(*BASE), read_digest(job)) == []
    said = job.output(0)
    assert 'MOEVEMENT_SECRET is not set' in said and 'replicas: 0' in said
    assert not job.memory.exists(), 'host memory is given back at a clean exit'
