# SPDX-License-Identifier: Apache-2.0
"""A recovery that computes other bits ends the job, and the next start has the right bits."""

import re

import pytest

from moevement_ext.errors import EXIT_OTHER_BITS
from moevement_ext.events import NextTier, RecoveryStarted
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_whole_job_recovery import BASE

pytestmark = pytest.mark.thorough

STOP = ['--sparse-ckpt-verify', 'stop']


def check(job: Cluster, expected: dict) -> None:
    """A chip is replaced: another start goes on from the windows, and finds nothing wrong."""
    named = rf'ends with exit status {EXIT_OTHER_BITS}, .* differing: [1-9]\d* \(\w'
    assert re.search(named, job.output(job.attempts - 1))
    job.finish()
    assert differences(expected, read_digest(job)) == []
    for rank in range(job.ranks):
        assert job.events_of(RecoveryStarted, rank)
        assert 'the start' not in [event.tier for event in job.events_of(NextTier, rank)]


@pytest.mark.mutation
def test_refused_replay_of_a_stage_ends_the_job(cluster: Make, reference: Reference) -> None:
    """The one before was not refused."""
    job = cluster(*BASE, '--sparse-ckpt-window', '3', *STOP)
    mutation = 'mutations.localized:one_bit_wrong_in_the_first_replay_of_rank_3'
    job.survive(fail_at='1:6:backward,3:10:backward', mutation=mutation)
    check(job, reference(*BASE))


@pytest.mark.mutation
def test_refused_start_of_the_whole_job_ends_it(cluster: Make, reference: Reference) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '2', *STOP)
    assert -9 in job.run(fail_at='1:9:backward')
    codes = job.run(mutation='mutations.localized:one_bit_wrong_on_rank_0', all_end=True)
    assert codes == [EXIT_OTHER_BITS] * job.ranks
    check(job, reference(*BASE))
