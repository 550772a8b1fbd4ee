# SPDX-License-Identifier: Apache-2.0
"""Gemini and CheckFreq train; a worker is SIGKILLed between two checkpoints.

What they recover from in other cases: `tests/unit/recover/test_global.py`.
"""

from pathlib import Path

import pytest

from moevement_ext.events import NextTier, Protected, Recovered, RecoveryStarted
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import SEALED
from tests.distributed.harness.setups import TWO_STAGES
from tests.distributed.test_disk import WAITS

CHECKFREQ = ['--sparse-ckpt-strategy', 'checkfreq', '--sparse-ckpt-interval']


@pytest.fixture
def disk(tmp_path: Path) -> list[str]:
    (tmp_path / 'disk').mkdir()
    return ['--sparse-ckpt-disk', str(tmp_path / 'disk')]


def check(job: Cluster, start: int, target: int) -> None:
    """All went back to one checkpoint, in processes that live."""
    for rank in range(job.ranks):
        assert [event.start for event in job.events_of(RecoveryStarted, rank)] == [start]
        (event,) = job.events_of(Recovered, rank)
        assert (event.scope, event.target, event.replayed) == ('global', target, target - start)
        assert not event.differing
        assert job.events_of(NextTier, rank) == []
        assert all(e.host_memory['log_ring'] == 0 for e in job.events_of(Protected, rank))


def test_checkfreq_recovers_from_its_checkpoint(
    cluster: Make, reference: Reference, disk: list[str]
) -> None:
    job = cluster(*TWO_STAGES, *CHECKFREQ, '3', *disk, 'max_wait=60', ranks=2)
    assert job.survive(fail_at='1:9:forward', mutation=f'{WAITS},{SEALED}') == {1: 1}
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    check(job, 6, 8)
    assert {event.replicas for event in job.events_of(Protected, 0)} == {0}
