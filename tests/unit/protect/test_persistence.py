# SPDX-License-Identifier: Apache-2.0
"""When a window is persisted, by the real coordinator: connections, rounds and processes change."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moevement_ext.coordinator import coordinator
from moevement_ext.coordinator.statements import Promises, RoundOver, Settled
from moevement_ext.memory.window.name import MAX_GIVEN_UP, Agreed, WindowName
from moevement_ext.protect.persistence import Persistence, WindowTracker
from tests.unit.coordinator.served import KeptHere
from tests.unit.protect.ranks import SECRETS, Promising
from tests.unit.replicate.peers import wait_for

pytestmark = pytest.mark.timed

WORLD = 3


class Job(Promising):
    """All ranks with one kind of windows, and what each was told last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kept: KeptHere | None = None) -> None:
        super().__init__(monkeypatch, WORLD, kept)
        self.told = [Agreed()] * WORLD
        self.trackers = [self._track(rank) for rank in range(WORLD)]
        self.enter()

    def _track(self, rank: int) -> Any:
        def hear(agreed: Agreed) -> None:
            self.told[rank] = agreed

        self.told[rank] = Agreed()
        return self.tracker(rank, 'memory', hear)

    def report(self, window: WindowName, *ranks: int) -> None:
        for rank in ranks:
            self.trackers[rank].report(window)

    def replace(self, rank: int) -> None:
        super().replace(rank)
        self.trackers[rank] = self._track(rank)

    def await_statements(self) -> None:
        """The coordinator has what all ranks state, and all have heard what follows."""

        wait_for(lambda: all(map(self._has_said, self.ranks, self.trackers)))
        wait_for(self._has_followed)

    def _has_said(self, one: Persistence, tracker: WindowTracker) -> bool:
        board, client = self.keeper.served.coordinator.board, one._client
        if board is None or client is None or client._own.round != one._round:
            return False
        said = client._own.promises.get(tracker.name, Promises())
        useful = [one for one in said.windows if not tracker.agreed.is_outdated(one)]
        told = Promises(tuple(useful), tracker.agreed.with_given_up(said.given_up).given_up)
        return told == tracker.promises and board.members.get(client._own.rank) == client._own

    def _has_followed(self) -> bool:
        board = self.keeper.served.coordinator.board
        found = board.conclude().in_round if board else ()
        agreements = [one.agreed for one in found if isinstance(one, Settled)]
        return board is not None and all(
            told == told.then(agreed) and tracker.agreed == told and self._has_said(one, tracker)
            for agreed in agreements
            for told, tracker, one in zip(self.told, self.trackers, self.ranks, strict=True)
        )

    def persisted(self) -> list[WindowName | None]:
        self.await_statements()
        return [agreed.persisted for agreed in self.told]

    def next_round(self, take_back: Callable[[int], None] = lambda rank: None) -> None:
        self.leave()
        for rank in range(WORLD):
            take_back(rank)
        self.enter()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(monkeypatch)
    yield job
    job.close()


def window(start: int, plan: str = 'a') -> WindowName:
    return WindowName(start, plan)


def test_persisted_on_every_rank_once_all_have_reported(job: Job) -> None:
    job.report(window(0), 0, 1, 2)
    assert job.persisted() == [window(0)] * WORLD
    job.report(window(4), 2, 0)
    assert job.persisted() == [window(0)] * WORLD
    job.report(window(4), 1)
    assert job.persisted() == [window(4)] * WORLD
    assert [one.promises for one in job.trackers] == [Promises((window(4),))] * WORLD, 'no more'


class Model:
    """Which ranks have which windows, and what they agree on by that."""

    def __init__(self) -> None:
        self.held: dict[WindowName, set[int]] = defaultdict(set)
        self.agreed = Agreed()

    def report(self, rank: int, name: WindowName) -> None:
        if not (self.agreed.is_persisted(name.start) or self.agreed.is_given_up(name.start)):
            self.held[name].add(rank)
            if len(self.held[name]) == WORLD:
                self.agreed = self.agreed.with_persisted(name)

    def take_back(self, rank: int, after: int) -> None:
        for name, ranks in self.held.items():
            if name.start > after:
                ranks.discard(rank)

    def give_up(self, rank: int, start: int) -> None:
        if not any(rank in ranks for name, ranks in self.held.items() if name.start == start):
            self.agreed = self.agreed.with_given_up([start])


STEPS = st.tuples(
    st.sampled_from(
        'report report report withdraw unpersisted give_up replace next_round restart'.split()
    ),
    st.integers(0, WORLD - 1),
    st.sampled_from([4, 4, 8]),
    st.sampled_from('aaab'),
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(STEPS, min_size=20, max_size=30))
def test_a_window_counts_once_for_each_rank_that_has_it(steps: list[Any]) -> None:
    """Whatever was reported twice, taken back, captured again or given up, and after deaths."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        job, model = Job(monkeypatch), Model()
        try:
            for step, rank, later, plan in steps:
                persisted = model.agreed.persisted
                start = later + (0 if persisted is None else persisted.start)
                _carry_out(job, model, step, rank, window(start, plan))
                job.await_statements()
                assert [told.persisted for told in job.told] == [model.agreed.persisted] * WORLD
                given_up = model.agreed.is_given_up(start)
                assert [told.is_given_up(start) for told in job.told] == [given_up] * WORLD
        finally:
            job.close()


def _carry_out(job: Job, model: Model, step: str, rank: int, name: WindowName) -> None:
    persisted = model.agreed.persisted
    newest = -1 if persisted is None else persisted.start
    match step:
        case 'report':
            job.report(name, rank)
            model.report(rank, name)
        case 'withdraw':  # a recovery starts from the persisted window, or a later one
            kept = name if name.start == newest + 8 else persisted or window(-1)
            job.next_round(lambda at: job.trackers[at].withdraw_after(kept) if at == rank else None)
            model.take_back(rank, kept.start)
        case 'unpersisted':
            job.next_round(
                lambda at: job.trackers[at].withdraw_unpersisted() if at == rank else None
            )
            model.take_back(rank, newest)
        case 'give_up':
            job.trackers[rank].give_up([name.start])
            model.give_up(rank, name.start)
        case 'replace':
            job.leave()
            job.replace(rank)
            if persisted is not None:  # from which it has recovered
                job.report(persisted, rank)
            job.enter()
            model.take_back(rank, newest)
        case 'next_round':
            job.next_round()
        case _:
            job.keeper.restart()


def test_a_stopped_process_that_goes_on_counts_no_more(job: Job) -> None:
    job.report(window(4), 0, 1)
    job.await_statements()
    job.leave()
    job.replace(2)
    old = job.former[-1]
    job.enter()
    old.trackers['memory'].report(window(4))  # in its round, which is over
    old.enter(job.round, [job.processes[0]] * WORLD)  # it does not know its successor
    time.sleep(0.3)
    assert job.persisted() == [None] * WORLD
    job.report(window(4), 2)
    assert job.persisted() == [window(4)] * WORLD


def test_agreement_is_not_applied_after_a_rank_has_left(job: Job) -> None:
    """Others may have taken the window back before this rank reports its windows."""
    (rank, *_), about = job.ranks, job.ranks[0]._round
    assert about is not None
    job.leave()
    rank._heard(Settled(about, 'memory', Agreed(window(4))))
    assert job.told[0].persisted is None
    rank.enter(job.round, job.processes)
    assert rank._round is None, 'a thread that is late enters no round again'


def test_window_given_up_stays_so_when_its_giver_is_replaced(job: Job) -> None:
    """The others have overwritten it since, though they had promised it."""
    job.report(window(4), 0, 1)
    job.trackers[2].give_up([4])
    wait_for(lambda: all(told.is_given_up(4) for told in job.told))
    job.leave()
    job.replace(2)
    job.enter()
    job.report(window(4), 0, 1, 2)
    assert job.persisted() == [None] * WORLD
    assert all(told.is_given_up(4) for told in job.told)


def test_window_that_never_completes_is_given_up(job: Job) -> None:
    """Rank 2 never has it. The others skip the windows after it, as they have no file for them."""
    job.report(window(0), 0, 1)
    for start in range(4, 4 * MAX_GIVEN_UP, 4):
        job.trackers[0].give_up([start])
    wait_for(lambda: all(len(told.given_up) == MAX_GIVEN_UP - 1 for told in job.told))
    job.await_statements()
    assert not any(told.is_given_up(0) for told in job.told)
    job.trackers[1].give_up([4 * MAX_GIVEN_UP])
    wait_for(lambda: all(told.is_given_up(0) for told in job.told))
    job.report(window(100), 0, 1, 2)
    assert job.persisted() == [window(100)] * WORLD


def test_new_process_of_rank_0_keeps_another_coordinator(job: Job) -> None:
    job.report(window(0), 0, 1, 2)
    assert job.persisted() == [window(0)] * WORLD
    job.leave()
    job.replace(0)
    job.former[0].close()
    job.enter()
    job.report(window(0), 0)
    job.report(window(4), 0, 1, 2)
    assert job.persisted() == [window(4)] * WORLD


def test_coordinator_of_the_launcher_outlives_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of an earlier start are still connected, as from a node that is cut off."""
    kept = KeptHere('127.0.0.1', SECRETS.of_launcher)
    first = Job(monkeypatch, kept)
    first.report(window(0), 0, 1, 2)
    assert first.persisted() == [window(0)] * WORLD
    first.leave()
    first.replace(0)
    first.former[0].close()
    first.enter()
    first.report(window(0), 0)
    assert first.persisted() == [window(0)] * WORLD
    later = Job(monkeypatch, kept)
    later.report(window(4), 0, 1, 2)
    assert later.persisted() == [window(4)] * WORLD
    first.report(window(8), 0, 1, 2)
    time.sleep(0.3)
    assert first.told == [Agreed(window(0))] * WORLD
    assert later.persisted() == [window(4)] * WORLD
    for one in (first, later, kept):
        one.close()


def test_lost_process_ends_the_round_of_the_others(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, 'TO_RECONNECT_S', 0.2)
    told: list[tuple[int, str]] = []
    job.ranks[0].on_over = lambda number, why: told.append((number, why))
    job.report(window(0), 0, 1, 2)
    job.await_statements()
    lost: Any = job.ranks[2]._client
    lost._post(lost._task.cancel)
    wait_for(lambda: told)
    assert told == [(job.round, 'rank 2 is lost')]
    job.ranks[0].leave()
    job.ranks[0]._heard(RoundOver(job.round + 1, 'too late'))
    assert len(told) == 1


def test_a_list_of_given_up_windows_replaces_the_one_before() -> None:
    """A merged one would be full, and give up window 0, which is still awaited."""
    first, later = (range(start, start + 4 * MAX_GIVEN_UP - 4, 4) for start in (4, 8))
    agreed = Agreed(None, tuple(first)).then(Agreed(None, tuple(later)))
    assert agreed.is_given_up(8) and not agreed.is_given_up(0)
    assert Agreed(window(4)).then(agreed).persisted == window(4)
