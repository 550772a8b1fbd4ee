# SPDX-License-Identifier: Apache-2.0
"""All nodes lose power: host memory is gone, and the job recovers from disk."""

import shutil
from pathlib import Path

import pytest

from moevement_ext.events import Recovered, RecoveryStarted
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.damage import flip_byte
from tests.distributed.test_whole_job_recovery import BASE

WAITS = 'mutations.disk:training_waits_for_the_disk'
NEWEST = 6
"""Start of the newest window that is on disk when the job dies; the one before stays there, too."""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / 'disk').mkdir()
    return tmp_path / 'disk'


def dead_job(cluster: Make, disk: Path, *flags: str) -> Cluster:
    """A job of windows of 2 that died in iteration 9, with two windows on the disks of all."""
    job = cluster(*BASE, '--sparse-ckpt-window', '2', 'max_wait=60', *flags)
    job.flags += ['--sparse-ckpt-disk', str(disk), '--sparse-ckpt-disk-every', '1']
    assert -9 in job.run(fail_at='1:9:forward', mutation=WAITS, timeout_s=400.0)
    assert all(len(windows(folder)) >= 2 for folder in rank_folders(job, disk))
    return job


def rank_folders(job: Cluster, disk: Path) -> list[Path]:
    return [disk / job.name / f'rank{rank}' for rank in range(job.ranks)]


def windows(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob('window-*'), key=lambda path: int(path.name.split('-')[1]))


def sources(job: Cluster) -> list[tuple[str, int]]:
    """Source and start of the window that each rank came back from at the start of the job."""
    first = [job.events_of(RecoveryStarted, rank)[0] for rank in range(job.ranks)]
    return [(str(event.source), event.start) for event in first]


def test_unmounted_disk_stops_the_start_and_loses_nothing(
    cluster: Make, reference: Reference, disk: Path, tmp_path: Path
) -> None:
    """A stage that is lost right after the recovery from disk recovers alone, although what its
    replay needs of iterations before was lost with the memory, too."""
    job = dead_job(cluster, disk)
    shutil.rmtree(job.memory)
    kept = {path.name for folder in rank_folders(job, disk) for path in windows(folder)}
    mounted = rank_folders(job, disk)[3]
    mounted.rename(tmp_path / 'away')
    assert job.run(all_end=True) == [2] * job.ranks
    said = job.output(attempt=1)
    assert f'all ranks had window {NEWEST}, and none is complete now' in said
    assert 'of rank 3 (node node1); ranks 0, 1, 2 (nodes node0, node1) have windows' in said
    shutil.rmtree(mounted)
    (tmp_path / 'away').rename(mounted)
    assert job.run(all_end=True, mutation='mutations.disk:directory_is_not_listed') == [2] * 4
    assert f'{mounted}: cannot be listed: Stale file handle' in job.output(attempt=2)
    assert {path.name for folder in rank_folders(job, disk) for path in windows(folder)} == kept
    assert job.survive(fail_at=f'3:{NEWEST + 2}:forward') == {3: 1}
    assert differences(reference(*BASE), read_digest(job)) == []
    assert sources(job) == [('disk', NEWEST)] * job.ranks
    assert job.events_of(Recovered, rank=3)[-1].localized
    assert list(disk.iterdir()) == [], 'at a clean end disks are given back'


@pytest.mark.mutation
@pytest.mark.thorough
def test_unverified_window_from_disk_changes_the_bits(
    cluster: Make, reference: Reference, disk: Path
) -> None:
    job = dead_job(cluster, disk)
    shutil.rmtree(job.memory)
    flip_byte(windows(rank_folders(job, disk)[2])[-1])
    job.settings = 'max_wait=0'  # holders of replicas do verify, and refuse
    job.finish(mutation='mutations.disk:window_from_disk_not_verified')
    assert sources(job) == [('disk', NEWEST)] * job.ranks
    assert differences(reference(*BASE), read_digest(job)) != []
