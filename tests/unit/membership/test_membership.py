# SPDX-License-Identifier: Apache-2.0
"""Processes of one job, each a thread here, go through rounds in a real store."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, Store, TCPStore

from moevement_ext.errors import EXIT_STUCK
from moevement_ext.membership import arrivals, membership
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import (
    FencedOut,
    Rendezvous,
    RoundEnded,
    end_round,
    present_round,
    why_broken,
)
from moevement_ext.membership.report import Report
from moevement_ext.membership.store_loss import StoreLoss
from tests.unit.forks import Forked
from tests.unit.membership import ranks
from tests.unit.membership.way import Way
from tests.unit.replicate.peers import wait_for

pytestmark = pytest.mark.timed

LIMIT_S = 120.0
"""Of what ends well before."""
TIMEOUT = timedelta(seconds=60)
HANG_S = 2.0
WORLD = 3


class Job:
    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.way = Way(self.store.port)
        self.threads = threads
        self.members: list[Membership] = []

    def start(self, rank: int) -> 'Future[Membership]':
        """A new process."""
        return self.threads.submit(self._start, rank)

    def _start(self, rank: int) -> Membership:
        # Rank 0 lists keys, for which torch keeps the GIL: a way in this process would not get on.
        port = self.way.port if rank else self.store.port
        store = TCPStore('127.0.0.1', port, is_master=False, timeout=TIMEOUT)
        member = Membership(Rendezvous(store, rank, WORLD), TIMEOUT, HANG_S, replacement)
        self.members.append(member)
        return member

    def move_on(self, member: Membership) -> 'Future[list[Report]]':
        """A survivor leaves and meets the others."""
        return self.threads.submit(self._move_on, member)

    def _move_on(self, member: Membership) -> list[Report]:
        member.leave('another rank died')
        return member.meet(lambda: survivor(member.origin))


def replacement() -> Report:
    return Report(survivor=False, node='a', pid=1, windows=[])


def survivor(origin: int) -> Report:
    return Report(survivor=True, node='a', pid=2, windows=[], origin=origin)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(membership, '_CLOSING', timedelta(seconds=0.1))  # they close one by one
    with ThreadPoolExecutor(WORLD) as threads:
        made = Job(threads)
        yield made
        for member in made.members:
            member.close()
        end_round(made.store, present_round(made.store), 'the test is over')
        made.way.close()


@pytest.fixture
def joined(job: Job) -> tuple[list[Membership], Membership]:
    """Two survivors, and a new process in the place of the third, which sets up."""
    members = [future.result() for future in [job.start(rank) for rank in range(WORLD)]]
    for member in members:
        assert not member.joining
        member.settle()
    members[2].close()
    end_round(job.store, 0, 'rank 2 died')
    coming = job.start(2)
    moving = [job.move_on(member) for member in members[:2]]
    assert [future.result()[2].survivor for future in moving] == [False, False]
    return members[:2], coming.result()


def test_new_process_joins_again_while_it_sets_up(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    """Twice; its training thread does nothing for it, and finds the newest rendezvous."""
    survivors, new = joined
    for _ in range(2):
        round = present_round(job.store)
        end_round(job.store, round, 'rank 1 lost a peer')
        moving = [job.move_on(member) for member in survivors]
        for future in moving:
            assert [r.survivor for r in future.result(TIMEOUT.total_seconds())] == [
                True,
                True,
                False,
            ]
    new.settle()
    assert [report.survivor for report in new.reports] == [True, True, False]
    assert new.joining and new.origin == survivors[0].origin
    new.store.set('address/2', 'here')
    assert survivors[0].store.get('address/2') == b'here', 'all are in the same round'
    assert not job.store.check(['evict/2'])


def test_a_process_of_an_earlier_attempt_of_the_job_ends(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    joined[0][0].origin -= 1
    job.move_on(joined[0][1])
    with pytest.raises(FencedOut, match='started again without this process'):
        job.move_on(joined[0][0]).result()


def test_who_must_not_take_part_says_why(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    survivors, new = joined
    new.refuse('rank 2 has other flags')
    moving = [job.move_on(member) for member in survivors]
    here = f'here/{present_round(job.store)}'
    wait_for(lambda: arrivals.missing(job.store, here, WORLD) == [2])
    assert [member.reason for member in survivors] == ['rank 2 has other flags'] * 2
    assert job.start(2).result().joining and all(future.result() for future in moving)


def test_after_the_set_up_only_the_training_thread_moves_on(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    survivors, new = joined
    new.settle()
    round = present_round(job.store)
    end_round(job.store, round, 'rank 1 lost a peer')
    moving = [job.move_on(member) for member in survivors]
    with pytest.raises(RoundEnded):
        new.barrier('ready')
    assert not job.store.check([f'join/{round + 1}/2'])
    mine = job.move_on(new)
    assert len({len(future.result()) for future in [*moving, mine]}) == 1


def test_a_failure_that_a_rank_did_not_hear_of_is_known_when_it_asks(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    """Its connection was silently lost, and its own error does not name a peer."""
    survivors, new = joined
    new.settle()
    deaf = survivors[0]
    deaf._watch.stop()
    assert not deaf.broken_in_the_store()
    time.sleep(0.5)
    assert not (survivors[1].broken or new.broken), 'to ask wakes nobody up'
    end_round(job.store, present_round(job.store), 'rank 1 lost a peer')
    assert not deaf.broken and deaf.broken_in_the_store()


def test_it_asks_again_when_the_store_does_not_answer_in_time(
    job: Job, joined: tuple[list[Membership], Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that took that for a no would end with its own error, and its state be lost."""
    survivors, new = joined
    new.settle()
    deaf = survivors[0]
    deaf._watch.stop()
    end_round(job.store, present_round(job.store), 'rank 1 lost a peer')
    connect, tries = StoreLoss._connect, iter([DistNetworkError('timed out')])

    def slow_at_first(loss: StoreLoss) -> Store:
        for error in tries:
            raise error
        return connect(loss)

    monkeypatch.setattr(StoreLoss, '_connect', slow_at_first)
    assert deaf.broken_in_the_store()


def test_process_that_was_replaced_while_it_set_up_learns_of_it(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    survivors, new = joined
    round = present_round(job.store)
    arrivals.sign(job.store, f'here/{round + 1}', 2, WORLD)  # another one was quicker to come
    end_round(job.store, round, 'rank 1 lost a peer')
    assert wait_until(lambda: new._lost is not None)
    with pytest.raises(FencedOut, match='replaced'):
        new.settle()


def test_who_joins_finds_what_was_left(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    survivors, before = joined
    before.settle()
    survivors[1].archive.set('exchange/plan/1/0', 'of the start')
    survivors[0].close()
    end_round(job.store, present_round(job.store), 'rank 0 died')
    coming = job.start(0)
    moving = [job.move_on(survivors[1]), job.move_on(before)]
    new = coming.result()
    assert [len(future.result()) for future in moving] == [WORLD, WORLD]
    assert new.joining
    assert new.archive.get('exchange/plan/1/0') == b'of the start'


def test_new_process_that_loses_its_connection_in_a_rendezvous_meets_the_others_all_the_same(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    """So do others that have lost theirs by then."""
    survivors, new = joined
    round = present_round(job.store)
    end_round(job.store, round, 'rank 1 lost a peer')
    job.store.wait([f'join/{round + 1}/2'], TIMEOUT)
    job.way.cut()
    moving = [job.move_on(member) for member in survivors]
    for future in moving:
        assert [r.survivor for r in future.result(TIMEOUT.total_seconds())] == [True, True, False]
    new.settle()
    assert [report.midway for report in new.reports] == [False, False, True]
    assert {member._result.round for member in (new, *survivors)} == {present_round(job.store)}


def test_survivor_whose_connection_is_lost_in_a_rendezvous_meets_the_others_all_the_same(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    """Nobody may count twice in a round, whatever of the last request was done."""
    survivors, new = joined
    new.settle()
    round = present_round(job.store)
    moving = [job.move_on(member) for member in survivors]
    job.store.wait([f'join/{round + 1}/{rank}' for rank in range(2)], TIMEOUT)
    job.way.cut()  # that of rank 1
    moving.append(job.move_on(new))
    found = [future.result(TIMEOUT.total_seconds()) for future in moving]
    assert [len(reports) for reports in found] == [WORLD] * WORLD
    assert len({member._result.round for member in (new, *survivors)}) == 1


def wait_until(true: Callable[[], bool]) -> bool:
    never = threading.Event()
    return any(true() or never.wait(0.05) for _ in range(1200))


# Ranks in processes of their own


@pytest.mark.parametrize(('committed', 'evicted'), [((7, 7), None), ((8, 7), 101)])
def test_rank_that_waits_for_too_long_ends_the_round(
    job: Job, committed: tuple[int, int], evicted: int | None
) -> None:
    """Nobody is dead or stuck by itself; one that alone is behind is replaced."""
    both = [
        Forked(ranks.waits_for_too_long, job.store.port, rank, committed[rank]) for rank in range(2)
    ]
    assert 'the wait was ended' in [rank.end(LIMIT_S)[1] for rank in both][0]
    reason = why_broken(job.store, 0) or ''
    assert reason.startswith('rank 0 has waited for others for ')
    assert ('rank 1 is behind' in reason) == (evicted is not None)
    found = int(job.store.get('evict/1')) if job.store.check(['evict/1']) else None
    assert found == evicted and not job.store.check(['evict/0'])


def test_who_is_busy_is_waited_for_at_a_barrier(job: Job) -> None:
    """For longer than a collective may take, since it would be noticed if it hung."""
    both = [Forked(ranks.meets_at_a_barrier, job.store.port, rank) for rank in range(2)]
    assert [rank.wait(LIMIT_S) for rank in both] == [0, 0]
    assert why_broken(job.store, 0) is None


def test_new_process_whose_set_up_stands_still_ends(job: Job) -> None:
    """It gives heartbeats, and the others wait for it."""
    members = [future.result() for future in [job.start(rank) for rank in range(WORLD)]]
    for member in members:
        member.settle()
    members[2].close()
    end_round(job.store, 0, 'rank 2 died')
    moving = [job.move_on(member) for member in members[:2]]
    code, _, said = Forked(ranks.never_sets_up, job.store.port).end(LIMIT_S)
    assert [len(future.result()) for future in moving] == [WORLD, WORLD]
    assert code == EXIT_STUCK, said
    assert 'rank 2 replaces itself: its set-up has stood still' in said


def test_process_whose_gpu_is_lost_ends_before_it_reports(job: Job) -> None:
    code, _, said = Forked(ranks.loses_its_gpu, job.store.port).end(LIMIT_S)
    assert code == EXIT_STUCK
    assert 'its GPU is lost: CUDA error: unspecified launch failure' in said
    assert why_broken(job.store, 0) == 'rank 1 died'


def test_process_whose_waits_cannot_be_ended_ends(job: Job) -> None:
    """As where a GPU does not let go of a communicator that is aborted."""
    code, _, said = Forked(ranks.is_never_unblocked, job.store.port).end(LIMIT_S)
    assert code == EXIT_STUCK, said
    assert 'rank 0 replaces itself: its waits have not ended within 1 s' in said
    assert 'in leave' in said


@pytest.mark.parametrize(
    ('does', 'place', 'reason'),
    [
        (ranks.stands_still, 'in wait', 'rank 0 is stuck'),
        (ranks.waits_for_a_peer, 'in _store_based_barrier', 'another rank died'),
    ],
)
def test_process_whose_training_thread_is_never_going_to_leave_ends_and_says_where(
    job: Job, does: Callable[[int], None], place: str, reason: str
) -> None:
    """It is stuck by itself; or a failure was announced, and it still waits for others."""
    code, _, said = Forked(does, job.store.port).end(LIMIT_S)
    assert code == EXIT_STUCK, said
    assert 'rank 0 replaces itself: its training thread has stood still' in said
    assert place in said
    assert reason in (why_broken(job.store, 0) or '')
