# SPDX-License-Identifier: Apache-2.0
"""A long job in which workers stop, sleep, come back too late, or wait for a loader for ever.

All ranks are held before an iteration until the test has struck, and it goes on when the events
say that the fault before has been recovered from.
"""

import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from moevement_ext.events import FailureDetected, NextTier, Recovered, RecoveryPhase
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import SETTLED, InTurn
from tests.distributed.probes import holding
from tests.distributed.test_localized_recovery import BASE

pytestmark = pytest.mark.timeout(900)

FLAGS = f'{BASE} --num-layers 2 --train-iters 23'.split()
HANG_S = 8
HELD = (11, 14, 17, 20)
"""Before these iterations all ranks wait; the loader blocks in the eighth."""
STUCK = 'rank 3 is stuck: its training thread has stood still'


def kill_watchdog(pid: int) -> None:
    children = psutil.Process(pid).children()
    (dog,) = [one for one in children if 'watchdog_process' in str(one.cmdline())]
    dog.kill()


class Hangs:
    """What happens to a job, in turn."""

    def __init__(self, job: Cluster) -> None:
        self.job = job
        self.zombies: list = []
        self.recoveries = 0
        job.directory.mkdir(parents=True)
        for iteration in HELD:
            holding.file(job.directory, iteration).touch()

    def steps(self, workers: list, start: Callable) -> Iterator[Callable[[], bool]]:
        """Conditions; what follows one happens when it is fulfilled."""
        yield self.recovered  # from the loader that blocks
        yield from self.held(11)
        self.stop(workers[2], 11)  # and it is killed
        yield self.recovered
        yield from self.held(14)
        kill_watchdog(workers[2].pid)  # as if all of its node stood still
        yield from self.noticed_when_stopped(workers[2], 14)
        os.kill(workers[2].pid, signal.SIGCONT)
        yield self.recovered
        yield from self.held(17)
        yield from self.noticed_when_stopped(workers[2], 17)
        self.zombies.append(workers[2])
        workers[2] = start(2, MOEVEMENT_NODE='spare')
        yield self.recovered
        os.kill(self.zombies[0].pid, signal.SIGCONT)
        yield from self.held(20)
        yield from self.meeting_that_a_survivor_joins_and_stops(workers)

    def meeting_that_a_survivor_joins_and_stops(
        self, workers: list
    ) -> Iterator[Callable[[], bool]]:
        """It has joined, and is killed; the new worker comes only then."""
        late = holding.new_workers(self.job.directory)
        late.touch()
        rendezvous = self.rendezvous(3)
        holding.file(self.job.directory, 20).unlink()
        os.kill(workers[1].pid, signal.SIGKILL)
        yield lambda: self.rendezvous(3) > rendezvous
        os.kill(workers[3].pid, signal.SIGSTOP)
        late.unlink()
        yield self.recovered

    def held(self, iteration: int) -> Iterator[Callable[[], bool]]:
        """Until all have come to the iteration before which they wait."""
        yield lambda: holding.all_wait(self.job.directory, iteration, self.job.ranks)

    def stop(self, worker: object, held: int) -> None:
        os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        holding.file(self.job.directory, held).unlink()

    def recovered(self) -> bool:
        """All ranks have, once more since this was true."""
        counts = [len(self.job.events_of(Recovered, rank)) for rank in range(self.job.ranks)]
        if min(counts) > self.recoveries:
            self.recoveries += 1
            return True
        return False

    def noticed_when_stopped(self, worker: object, held: int) -> Iterator[Callable[[], bool]]:
        """Until rank 0 knows it by the coordinator, to which the worker says nothing any more."""
        known = len(self.job.events_of(FailureDetected, rank=0))
        self.stop(worker, held)
        yield lambda: len(self.job.events_of(FailureDetected, rank=0)) > known
        assert self.job.events_of(FailureDetected, rank=0)[-1].reason == 'rank 2 is lost'

    def rendezvous(self, rank: int) -> int:
        events = self.job.events_of(RecoveryPhase, rank)
        return sum(event.phase == 'meet' for event in events)


def test_hangs_in_a_long_job_are_recovered(cluster: Make, reference: Reference) -> None:
    expected = reference(*FLAGS)
    timeouts = f'--sparse-ckpt-hang-timeout {HANG_S} --sparse-ckpt-stuck-timeout 10'.split()
    job = cluster(*FLAGS, '--sparse-ckpt-window', '3', *SETTLED, *timeouts)
    hangs = Hangs(job)
    in_turn = InTurn(hangs.steps)
    restarts = job.survive(
        fault=in_turn,
        mutation='mutations.liveness:held_ranks_and_a_loader_that_blocks',
    )
    assert in_turn.done, 'all has happened'
    # Rank 3: stuck, and stopped in the rendezvous; rank 2: killed once, and replaced once by hand.
    assert restarts == {1: 1, 2: 1, 3: 2}
    assert differences(expected, read_digest(job)) == []
    for rank in range(job.ranks):
        assert job.events_of(NextTier, rank) == []
        assert all(event.localized for event in job.events_of(Recovered, rank))
        assert not any(event.differing for event in job.events_of(Recovered, rank))
    check_each(job)
    hangs.zombies[0].join(120)
    assert hangs.zombies[0].exitcode not in (None, 0), 'it is fenced out'
    assert 'was replaced by another process' in job.output(0)


def check_each(job: Cluster) -> None:
    """What the survivor that nothing happened to says of each."""
    stuck, killed, woken, replaced, *_, met = job.events_of(Recovered, rank=0)
    assert [event.replacements for event in (stuck, killed, woken, replaced)] == [
        [3],
        [2],
        [],
        [2],
    ]
    assert woken.stages == [] and woken.replayed == 0, 'no process replaced it'
    assert {3} <= set(met.replacements) <= {1, 3}, (
        'rank 1 may have its state before rank 3 is killed'
    )
    reasons = [event.reason for event in job.events_of(FailureDetected, rank=0)]
    assert STUCK in reasons[0]
    assert 'mutations/liveness.py' in (job.directory / 'attempt0-rank3.log').read_text()
    for replay in (stuck, killed, replaced, met):
        assert replay.stages, replay
        of_all = [e for rank in range(job.ranks) for e in job.events_of(Recovered, rank)]
        assert sum(e.verified for e in of_all if e.target == replay.target) > 0
