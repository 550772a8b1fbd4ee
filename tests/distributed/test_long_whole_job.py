# SPDX-License-Identifier: Apache-2.0
"""A long job whose workers all die repeatedly; each launch resumes from the previous one.

After each launch its recovery is looked at, and what it replayed was compared with captures of the
launch before wherever some were left.
"""

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

from moevement_ext.events import NextTier, Recovered, RecoveryStarted
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.damage import copies_of_newest, flip_byte, windows
from tests.distributed.harness.faults import PERSISTED, SETTLED
from tests.distributed.test_localized_recovery import BASE

pytestmark = pytest.mark.timeout(900)

FLAGS = (
    f'{BASE} --num-layers 2 --train-iters 27 --dataloader-type cyclic --hidden-dropout 0.1 '
    '--eval-interval 4 --eval-iters 2'
).split()

OTHERWISE = '--sparse-ckpt-order soft freezes=false'.split()
"""As the default does not have them: the bits are the same."""


class Launches:
    """A job and what its launches have come to.

    With windows of 3 that begin where a launch goes on, a death five iterations later leaves one
    window and two newer captures.
    """

    def __init__(self, job: Cluster) -> None:
        self.job = job

    def dies(self, where: str, *back_at: int, verified: bool = True) -> None:
        """The next launch: it comes back at such an iteration, if any, and dies later on."""
        before = self.counts()
        assert -9 in self.job.run(fail_at=where, mutation=PERSISTED), where
        self.check(before, back_at, verified)

    def ends(self, *back_at: int) -> None:
        before = self.counts()
        self.job.finish()
        self.check(before, back_at, verified=False)

    def counts(self) -> list[int]:
        """Recoveries so far, by rank."""
        return [len(self.job.events_of(Recovered, rank)) for rank in range(self.job.ranks)]

    def check(self, before: list[int], back_at: Collection[int], verified: bool) -> None:
        """Each rank has recovered once in the launch, with nothing that differs."""
        new = [
            event
            for rank in range(self.job.ranks)
            for event in self.job.events_of(Recovered, rank)[before[rank] :]
        ]
        if not back_at:
            assert new == []
            return
        assert [event.rank for event in new] == list(range(self.job.ranks))
        (iteration,) = {event.iteration for event in new}
        assert iteration in back_at
        assert [event.differing for event in new] == [[]] * self.job.ranks
        assert not verified or sum(event.verified for event in new) > 0


def exchange_nodes(job: Cluster) -> None:
    """As in a job that goes back to the queue, and gets its nodes in another order."""
    first, second = job.node_memory(0), job.node_memory(1)
    first.rename(job.memory / 'other')
    second.rename(first)
    (job.memory / 'other').rename(second)


def test_repeated_whole_job_recoveries(cluster: Make, reference: Reference) -> None:
    job = cluster(*FLAGS, '--sparse-ckpt-window', '3', *SETTLED, *OTHERWISE)
    launches = Launches(job)
    launches.dies('1:8:forward')
    launches.dies('2:5:load')
    launches.dies('3:5:convert')
    launches.dies('0:8:backward', 5, verified=False)  # what was committed since died with a launch
    launches.dies('1:12:forward', 7, verified=False)
    assert list(job.node_memory(1).rglob('window-*.window'))
    shutil.rmtree(job.node_memory(1))
    launches.dies('2:16:reduce', 11)
    refused = windows(job, node=0, holder=1, owner=1)[0]
    flip_byte(refused)
    launches.dies('1:20:forward', 15)
    check_refused(job, refused)
    damaged = copies_of_newest(job, owner=1)
    for path in damaged:
        flip_byte(path)
    launches.dies('3:24:reduce', 19, verified=False)  # captures were after the damaged one
    started = job.events_of(RecoveryStarted)[-1].start
    assert started < int(damaged[0].name.split('-')[1]), 'an older window is used'
    exchange_nodes(job)
    # What ranks captured, and committed since the newest window, may be lost to them.
    launches.dies('0:25:backward', 21, 22, 23, verified=False)
    ranks = [path.name for path in job.node_memory(0).iterdir() if path.name.isdecimal()]
    assert sorted(ranks) == ['0', '1'], 'nothing is kept for the ranks they had'
    launches.ends(24)
    assert differences(reference(*FLAGS), read_digest(job)) == []
    assert [event for rank in range(job.ranks) for event in job.events_of(NextTier, rank)] == []
    assert not job.memory.exists(), 'host memory is given back at a clean exit'


def check_refused(job: Cluster, path: Path) -> None:
    """A copy is named, and a replica is used."""
    output = job.output(attempt=job.attempts - 1)
    assert 'refused' in output and path.name in output and 'checksum' in output
