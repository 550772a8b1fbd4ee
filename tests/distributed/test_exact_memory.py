# SPDX-License-Identifier: Apache-2.0
"""Recoveries in a tmpfs of exactly the planned size: none takes more than the plan says.

`--exact-memory` gives all tests of this folder such a tmpfs.
"""

from pathlib import Path

import pytest

from moevement_ext.events import ProtectionReduced, Recovered
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import SETTLED
from tests.distributed.test_whole_job_recovery import BASE

SURVIVED = {
    'one worker': ('1:8:forward', ()),
    'one worker, twice': ('1:8:forward,1:9:forward:1', ()),
    'a stage with the memory of its node': ('2:8:forward,3:8:forward', (1,)),
}


@pytest.fixture
def job(cluster: Make, tmp_path: Path) -> Cluster:
    """With everything that host memory is taken for."""
    disk = tmp_path / 'disk'
    disk.mkdir()
    flags = ['--sparse-ckpt-disk', str(disk), '--sparse-ckpt-disk-every', '3']
    return cluster(*BASE, '--sparse-ckpt-window', '3', *SETTLED, *flags, exact_memory=True)


@pytest.mark.thorough
@pytest.mark.parametrize('lost', SURVIVED)
def test_localized_recovery_fits_the_planned_memory(
    lost: str, job: Cluster, reference: Reference
) -> None:
    fail_at, wiped = SURVIVED[lost]
    assert job.survive(fail_at=fail_at, wipe=wiped)
    check(job, reference)


@pytest.mark.thorough
def test_two_whole_job_recoveries_fit_the_planned_memory(
    job: Cluster, reference: Reference
) -> None:
    assert -9 in job.run(fail_at='1:8:forward')
    assert -9 in job.run(fail_at='2:10:backward')
    job.finish()
    check(job, reference)


def check(job: Cluster, reference: Reference) -> None:
    """The bits are right, and nothing that was planned was left out."""
    assert differences(reference(*BASE), read_digest(job)) == []
    for rank in range(job.ranks):
        assert job.events_of(ProtectionReduced, rank) == []
    assert job.events_of(Recovered, rank=3)
