# SPDX-License-Identifier: Apache-2.0
"""A new process joins the rendezvous during its set-up, once a survivor waits for it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.membership import counters, exchange, membership
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import (
    Rendezvous,
    end_round,
    present_round,
)
from moevement_ext.membership.report import Report, encode

pytestmark = pytest.mark.timed

TIMEOUT = timedelta(seconds=60)
LIMIT_S = TIMEOUT.total_seconds()
HANG_S = 30.0
WORLD = 3


class Job:
    """Members that are threads; the last rank is lost and replaced."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.threads = threads
        self.members: list[Membership] = []

    def start(self, rank: int) -> 'Future[Membership]':
        return self.threads.submit(self._start, rank)

    def _start(self, rank: int) -> Membership:
        store = TCPStore('127.0.0.1', self.store.port, is_master=False, timeout=TIMEOUT)
        brought = Report(survivor=False, node='a', process=1, windows=[])
        met = Rendezvous(store, rank, WORLD)
        member = Membership(met, TIMEOUT, HANG_S, lambda: brought)
        self.members.append(member)
        return member

    def move_on(self, member: Membership) -> 'Future[list[Report]]':
        def leave_and_meet() -> list[Report]:
            member.leave('another rank died')
            return member.meet(lambda: survivor(member))

        return self.threads.submit(leave_and_meet)

    def waits(self, rank: int, round: int) -> None:
        self.store.wait([counters.place_in(round, rank)], TIMEOUT)


def survivor(member: Membership) -> Report:
    return Report(
        survivor=True, node='a', process=2, windows=[], origin=member.origin, details=b'handed over'
    )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(membership, '_CLOSING', timedelta(seconds=0.1))  # members close one by one
    with ThreadPoolExecutor(WORLD + 2) as threads:
        made = Job(threads)
        yield made
        for member in made.members:
            member.have_met()
            if member._lost is None:
                member.close()
        end_round(made.store, present_round(made.store), 'the test is over')


@pytest.fixture
def survivors(job: Job) -> list[Membership]:
    """Survivors of three members that have started together; the last one is lost."""
    members = [future.result() for future in [job.start(rank) for rank in range(WORLD)]]
    for member in members:
        assert not member.joining
        member.settle()
    members[2].close()
    end_round(job.store, 0, 'rank 2 died')
    return members[:2]


def test_new_process_sets_up_before_all_ranks_have_arrived(
    job: Job, survivors: list[Membership]
) -> None:
    """It has the report of the waiting survivor, and the values left for it in the store."""
    survivors[1].archive.set('exchange/plan/1/0', 'of the start')
    first = job.move_on(survivors[0])
    job.waits(0, 1)
    new = job.start(2).result(LIMIT_S)
    assert new.joining and [report.details for report in new.reports] == [b'handed over']
    assert new.archive.get('exchange/plan/1/0') == b'of the start'
    job.waits(2, 1)  # it has arrived, on its other thread
    second = job.move_on(survivors[1])
    new.have_met()
    new.settle()
    assert [report.survivor for report in new.reports] == [True, True, False]
    assert first.result(LIMIT_S) == second.result(LIMIT_S) == new.reports
    assert {member.taken.round for member in (new, *survivors)} == {1}


def test_new_process_waits_if_no_survivor_waits(job: Job, survivors: list[Membership]) -> None:
    coming = job.start(2)
    job.waits(2, 1)
    for moving in [job.move_on(member) for member in survivors]:
        assert len(moving.result(LIMIT_S)) == WORLD
    assert len(coming.result(LIMIT_S).reports) == WORLD


def test_job_of_new_processes_starts_together(job: Job, survivors: list[Membership]) -> None:
    """None has state to hand over, even if one arrived earlier."""
    for member in survivors:
        member.close()
    again = [job.start(rank) for rank in range(WORLD)]
    assert [future.result(LIMIT_S).joining for future in again] == [False] * WORLD


def test_new_process_joins_again_after_another_failure(
    job: Job, survivors: list[Membership]
) -> None:
    job.move_on(survivors[0]).add_done_callback(lambda done: done.exception())
    job.waits(0, 1)
    new = job.start(2).result(LIMIT_S)
    job.waits(2, 1)
    end_round(job.store, 1, 'rank 1 died')
    second = job.move_on(survivors[1])
    assert len(second.result(LIMIT_S)) == WORLD
    new.settle()
    assert new.taken.round == 2 and [report.midway for report in new.reports][2]


def test_new_process_ends_if_all_survivors_are_lost(
    job: Job, survivors: list[Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was set up to join survivors, so it cannot start together with the others."""
    ended: list[int] = []
    monkeypatch.setattr(membership, 'end_at_once', ended.append)
    brought = exchange.packed(encode(survivor(survivors[0])))
    counters.sign(job.store, 'here/1', 0, WORLD)
    job.store.set(counters.place_in(1, 0), brought)  # type: ignore[arg-type]
    for member in survivors:
        member.close()
    new = job.start(2).result(LIMIT_S)
    assert new.joining
    job.waits(2, 1)
    end_round(job.store, 1, 'rank 0 died')
    others = [job.start(rank) for rank in range(2)]
    new.have_met()
    assert ended == [EXIT_WHOLE_JOB]
    job.start(2).result(LIMIT_S)  # the others wait for its replacement
    assert [future.result(LIMIT_S).joining for future in others] == [False, False]
