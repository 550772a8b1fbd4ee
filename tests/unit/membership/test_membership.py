# SPDX-License-Identifier: Apache-2.0
"""Processes of one job, each a thread here, in rounds of a real store."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore

from moevement_ext.errors import EXIT_STUCK, EXIT_WHOLE_JOB
from moevement_ext.membership import counters, exchange, membership
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import (
    FencedOut,
    Rendezvous,
    RoundEnded,
    end_round,
    how_broken,
    present_round,
)
from moevement_ext.membership.report import Report, encode
from tests.support.forks import Forked
from tests.support.way import Way
from tests.unit.membership import ranks

pytestmark = pytest.mark.timed

LIMIT_S = 120.0
"""Timeout of operations that end well before."""
TIMEOUT = timedelta(seconds=60)
HANG_S = 20.0
WORLD = 3


class Job:
    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.way = Way(self.store.port)
        self.threads = threads
        self.members: list[Membership] = []
        self.details = b''

    def start(self, rank: int) -> 'Future[Membership]':
        return self.threads.submit(self._start, rank)

    def _start(self, rank: int) -> Membership:
        # Rank 0 lists keys, for which torch holds the GIL: a relay in this process would block.
        port = self.way.port if rank else self.store.port
        store = TCPStore('127.0.0.1', port, is_master=False, timeout=TIMEOUT)
        member = Membership.join(Rendezvous(store, rank, WORLD), TIMEOUT, HANG_S, replacement)
        self.members.append(member)
        return member

    def move_on(self, member: Membership) -> 'Future[list[Report]]':
        """A survivor leaves and rendezvouses with the others."""
        return self.threads.submit(self._move_on, member)

    def _move_on(self, member: Membership) -> list[Report]:
        member.leave('another rank died')
        return member.meet(lambda: survivor(member.origin, self.details))

    def waits(self, rank: int, round: int) -> None:
        self.store.wait([counters.place_in(round, rank)], TIMEOUT)


def replacement() -> Report:
    return Report(survivor=False, node='a', process=1, windows=[])


def survivor(origin: int, details: bytes = b'') -> Report:
    return Report(survivor=True, node='a', process=2, windows=[], origin=origin, details=details)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(membership, '_CLOSING', timedelta(seconds=0.1))  # members close one by one
    with ThreadPoolExecutor(WORLD + 2) as threads:
        made = Job(threads)
        yield made
        for member in made.members:
            member.wait_for_first_rendezvous()
            if member._lost is None:
                member.close()
        end_round(made.store, present_round(made.store), 'the test is over')
        made.way.close()


@pytest.fixture
def joined(job: Job) -> tuple[list[Membership], Membership]:
    """Two survivors, and a new process of the third rank, which is setting up."""
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


def test_process_of_an_earlier_attempt_of_the_job_is_fenced_out(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    joined[0][0].origin -= 1
    job.move_on(joined[0][1])
    with pytest.raises(FencedOut, match='started again without this process'):
        job.move_on(joined[0][0]).result()


def test_settled_process_joins_only_from_its_training_thread(
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


def test_unnoticed_failure_is_found_in_the_store(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    """Its connection was silently lost, and its own error does not name a peer."""
    survivors, new = joined
    new.settle()
    deaf = survivors[0]
    deaf._joined.watch.stop()
    assert not deaf.broken_in_the_store()
    time.sleep(0.5)
    assert not (survivors[1].broken or new.broken), 'a request wakes no rank'
    end_round(job.store, present_round(job.store), 'rank 1 lost a peer')
    assert not deaf.broken and deaf.broken_in_the_store()


def test_process_replaced_during_its_set_up_is_fenced_out(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    survivors, new = joined
    round = present_round(job.store)
    job.store.set(counters.place_in(round + 1, 2), 'another process was first')
    end_round(job.store, round, 'rank 1 lost a peer')
    assert wait_until(lambda: new._lost is not None)
    with pytest.raises(FencedOut, match='replaced'):
        new.settle()


def test_survivor_reconnects_during_a_rendezvous(
    job: Job, joined: tuple[list[Membership], Membership]
) -> None:
    """A rank must not count twice in a round, whether its last request was executed or not.

    The others may have met without it, and go on to its round.
    """
    survivors, new = joined
    new.settle()
    round = present_round(job.store)
    moving = {member: job.move_on(member) for member in survivors}
    job.store.wait([f'join/{round + 1}/{rank}' for rank in range(2)], TIMEOUT)
    job.way.cut()  # the connection of rank 1
    moving[new] = job.move_on(new)

    def all_have_met() -> bool:
        for member in [one for one, future in moving.items() if future.done() and one.broken]:
            moving[member] = job.move_on(member)
        rounds = {member._joined.result.round for member in moving}
        return all(future.done() for future in moving.values()) and len(rounds) == 1

    assert wait_until(all_have_met)
    assert [len(future.result()) for future in moving.values()] == [WORLD] * WORLD


# A new process joins during its set-up, once a survivor waits for it


@pytest.fixture
def lost_one(job: Job) -> list[Membership]:
    """Survivors of three members; a report of theirs suffices for the set-up of a new process."""
    members = [future.result() for future in [job.start(rank) for rank in range(WORLD)]]
    for member in members:
        assert not member.joining
        member.settle()
    members[2].close()
    job.details = b'handed over'
    end_round(job.store, 0, 'rank 2 died')
    return members[:2]


def test_new_process_sets_up_before_all_ranks_have_arrived(
    job: Job, lost_one: list[Membership]
) -> None:
    """It has the report of the waiting survivor, and the values left for it in the store."""
    lost_one[1].archive.set('exchange/plan/1/0', 'of the start')
    first = job.move_on(lost_one[0])
    job.waits(0, 1)
    new = job.start(2).result(LIMIT_S)
    assert new.joining and [report.details for report in new.reports] == [b'handed over']
    assert new.archive.get('exchange/plan/1/0') == b'of the start'
    job.waits(2, 1)  # it has arrived, on its other thread
    second = job.move_on(lost_one[1])
    new.wait_for_first_rendezvous()
    new.settle()
    assert [report.survivor for report in new.reports] == [True, True, False]
    assert first.result(LIMIT_S) == second.result(LIMIT_S) == new.reports
    assert {member.taken.round for member in (new, *lost_one)} == {1}


def test_new_process_waits_if_no_survivor_waits(job: Job, lost_one: list[Membership]) -> None:
    coming = job.start(2)
    job.waits(2, 1)
    for moving in [job.move_on(member) for member in lost_one]:
        assert len(moving.result(LIMIT_S)) == WORLD
    assert len(coming.result(LIMIT_S).reports) == WORLD


def test_job_of_new_processes_starts_together(job: Job, lost_one: list[Membership]) -> None:
    """None has state to hand over, even if one arrived earlier."""
    for member in lost_one:
        member.close()
    again = [job.start(rank) for rank in range(WORLD)]
    assert [future.result(LIMIT_S).joining for future in again] == [False] * WORLD


def test_new_process_ends_if_all_survivors_are_lost(
    job: Job, lost_one: list[Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was set up to join lost_one, so it cannot start together with the others."""
    ended: list[int] = []
    monkeypatch.setattr(membership, 'end_at_once', ended.append)
    brought = exchange.packed(encode(survivor(lost_one[0].origin, job.details)))
    counters.sign(job.store, 'here/1', 0, WORLD)
    job.store.set(counters.place_in(1, 0), brought)  # type: ignore[arg-type]
    for member in lost_one:
        member.close()
    new = job.start(2).result(LIMIT_S)
    assert new.joining
    job.waits(2, 1)
    end_round(job.store, 1, 'rank 0 died')
    others = [job.start(rank) for rank in range(2)]
    new.wait_for_first_rendezvous()
    assert ended == [EXIT_WHOLE_JOB]
    job.start(2).result(LIMIT_S)  # the others wait for its replacement
    assert [future.result(LIMIT_S).joining for future in others] == [False, False]


# Waits of the training thread


@pytest.fixture
def settled(job: Job) -> Membership:
    """One of three members; all are set up."""
    members = [future.result() for future in [job.start(rank) for rank in range(WORLD)]]
    for member in members:
        member.settle()
    return members[0]


def test_failure_before_groups_exist_ends_the_waits_in_them(
    job: Job, settled: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the training thread would wait in a collective until it counts as hung."""
    end_round(job.store, 0, 'rank 1 died')
    assert wait_until(lambda: settled._standstill.unblocked_at is not None)
    woken = threading.Event()
    monkeypatch.setattr(membership, 'ProcessGroups', Mock())
    settled.watch('gloo', woken.set)
    assert woken.is_set()


def test_update_under_way_ends_before_the_waits_are_ended(
    job: Job, settled: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that all its ranks can finish need not be replayed."""
    monkeypatch.setattr(membership, '_UPDATE_GRACE_S', LIMIT_S)
    monkeypatch.setattr(membership, 'ProcessGroups', Mock())
    woken = threading.Event()
    settled.watch('gloo', woken.set)
    settled.not_updating.clear()
    end_round(job.store, 0, 'rank 1 died')
    assert wait_until(lambda: settled.broken)
    assert not woken.wait(0.3)
    settled.not_updating.set()
    assert woken.wait(LIMIT_S)


def wait_until(true: Callable[[], bool]) -> bool:
    never = threading.Event()
    return any(true() or never.wait(0.05) for _ in range(1200))


# Ranks in separate processes


@pytest.mark.parametrize('hangs', [False, True])
def test_rank_that_waits_for_too_long_ends_the_round(job: Job, hangs: bool) -> None:
    """No rank is dead or stuck; a single rank that is behind is replaced."""
    both = [Forked(ranks.waits_for_too_long, job.store.port, rank, hangs) for rank in range(2)]
    (_, said, _), (code, _, why) = [rank.end(LIMIT_S) for rank in both]
    assert 'the wait was ended' in said
    reason = how_broken(job.store, 0).reason
    assert reason.startswith('rank 0 has waited for others for ')
    assert ('rank 1 is behind' in reason) == hangs
    assert code == (EXIT_STUCK if hangs else 0), why
    assert ('rank 1 replaces itself: rank 0 has waited' in why) == hangs


def test_barrier_waits_for_a_busy_rank(job: Job) -> None:
    both = [Forked(ranks.meets_at_a_barrier, job.store.port, rank) for rank in range(2)]
    assert [rank.wait(LIMIT_S) for rank in both] == [0, 0]
    assert how_broken(job.store, 0).reason == 'unknown'


def test_new_process_with_a_hung_set_up_ends(job: Job) -> None:
    """It sends heartbeats, and the others wait for it."""
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


def test_process_with_a_lost_gpu_ends_before_its_report(job: Job) -> None:
    code, _, said = Forked(ranks.loses_its_gpu, job.store.port).end(LIMIT_S)
    assert code == EXIT_STUCK
    assert 'its GPU is lost: CUDA error: unspecified launch failure' in said
    assert how_broken(job.store, 0).reason == 'rank 1 died'


def test_process_with_waits_that_cannot_be_aborted_ends(job: Job) -> None:
    code, _, said = Forked(ranks.is_never_unblocked, job.store.port).end(LIMIT_S)
    assert code == EXIT_STUCK, said
    assert 'rank 0 replaces itself: its waits have not ended within 1 s' in said
    assert 'in leave' in said


def test_process_that_stays_in_an_ended_wait_ends_with_its_stack(job: Job) -> None:
    code, _, said = Forked(ranks.waits_for_a_peer, job.store.port).end(LIMIT_S)
    assert code == EXIT_STUCK, said
    assert 'rank 0 replaces itself: its training thread has stood still' in said
    assert 'in _store_based_barrier' in said
