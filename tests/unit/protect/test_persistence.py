# SPDX-License-Identifier: Apache-2.0
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from moevement_ext.memory.window.name import MAX_GIVEN_UP, Agreed, WindowName
from moevement_ext.protect.persistence import PersistenceTracker
from tests.support.way import DistantStore
from tests.unit.replicate.peers import wait_for

pytestmark = pytest.mark.timed

WORLD = 3
DEADLINE_S = 120.0
"""How long a test waits for something that comes at once."""
TIMEOUT = timedelta(seconds=DEADLINE_S)


class Job:
    """The trackers of all ranks, each with its own connection to a real store."""

    def __init__(self) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.persisted: list[queue.Queue[WindowName]] = [queue.Queue() for _ in range(WORLD)]
        self.agreed = [Agreed()] * WORLD
        self.trackers = [self._tracker(rank) for rank in range(WORLD)]

    def _tracker(self, rank: int) -> PersistenceTracker:
        store = TCPStore('127.0.0.1', self.store.port, is_master=False, timeout=TIMEOUT)
        self.agreed[rank] = Agreed()
        return PersistenceTracker(store, rank, WORLD, partial(self._hear, rank))

    def _hear(self, rank: int, agreed: Agreed) -> None:
        before, self.agreed[rank] = self.agreed[rank], agreed
        if agreed.persisted is not None and agreed.persisted != before.persisted:
            self.persisted[rank].put(agreed.persisted)

    def replace(self, rank: int) -> None:
        """Another process of this rank, which knows nothing of the one before."""
        self.trackers[rank].stop()
        self.trackers[rank] = self._tracker(rank)

    def settle(self, expected: Agreed) -> None:
        """All have done what they were told, and have heard of what all agree on."""
        wait_for(lambda: not any(tracker._tasks for tracker in self.trackers))
        for tracker in self.trackers:
            tracker.look()
        wait_for(lambda: not any(tracker._tasks for tracker in self.trackers))
        assert self.agreed == [expected] * WORLD

    def wait_until_counted(self, window: WindowName, ranks: int) -> None:
        """Wait until as many ranks have reported a window that is not persisted yet."""
        key = f'complete/{window.start}/{window.plan}'
        wait_for(lambda: self.store.add(key, 0) >= ranks or self._is_persisted(window))

    def _is_persisted(self, window: WindowName) -> bool:
        return any(agreed.is_persisted(window.start) for agreed in self.agreed)

    def report(self, window: WindowName, *ranks: int) -> None:
        for rank in ranks:
            self.trackers[rank].report(window)

    def next_persisted(self) -> list[WindowName]:
        return [heard.get(timeout=DEADLINE_S) for heard in self.persisted]

    def stop(self) -> None:
        for tracker in self.trackers:
            tracker.stop()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.stop()


def window(start: int, plan: str = 'a') -> WindowName:
    return WindowName(start, plan)


def test_persisted_on_every_rank_once_all_have_reported(job: Job) -> None:
    job.report(window(0), 0, 1, 2)
    assert job.next_persisted() == [window(0)] * WORLD
    job.report(window(4), 2, 0, 1)
    assert job.next_persisted() == [window(4)] * WORLD


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

    def withdraw_after(self, rank: int, kept: WindowName | None) -> None:
        for name, ranks in self.held.items():
            if kept is None or name.start > kept.start:
                ranks.discard(rank)

    def give_up(self, start: int) -> None:
        self.agreed = self.agreed.with_given_up([start])


STEPS = st.tuples(
    st.sampled_from('report report report withdraw unpersisted give_up replace'.split()),
    st.integers(0, WORLD - 1),
    st.sampled_from([4, 4, 8]),
    st.sampled_from('aaab'),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, min_size=30, max_size=40))
def test_a_window_counts_once_for_each_rank_that_has_it(steps: list[Any]) -> None:
    """Whatever was reported twice, by a predecessor, withdrawn, captured again or given up."""
    job, model = Job(), Model()
    try:
        for step, rank, later, plan in steps:
            persisted, tracker = model.agreed.persisted, job.trackers[rank]
            start = later + (0 if persisted is None else persisted.start)
            name = window(start, plan)
            if step == 'report':
                tracker.report(name)
                model.report(rank, name)
            elif step == 'withdraw':  # a recovery starts from the persisted window, or a later one
                kept = name if later > 4 else persisted or window(0)
                tracker.withdraw_after(kept)
                model.withdraw_after(rank, kept)
            elif step == 'unpersisted':
                tracker.withdraw_unpersisted()
                model.withdraw_after(rank, persisted)
            elif step == 'give_up':
                tracker.give_up([start])
                model.give_up(start)
            else:
                job.replace(rank)
            job.settle(model.agreed)
    finally:
        job.stop()


def test_withdrawn_persisted_window_is_withdrawn_for_new_processes(job: Job) -> None:
    """All copies of one rank's window were lost or damaged; the job goes on from an older one."""
    job.report(window(0), 0, 1, 2)
    job.next_persisted()
    job.report(window(4), 0, 1, 2)
    assert job.next_persisted() == [window(4)] * WORLD
    job.trackers[2].withdraw_after(window(0))
    job.replace(1)
    job.report(window(8), 0, 1, 2)
    heard = [queue.get(timeout=DEADLINE_S) for queue in job.persisted]
    assert heard[1] == window(0), 'not window 4'


def test_a_count_that_was_left_behind_does_not_count(job: Job) -> None:
    """The rank that published the window died before it could delete the count."""
    job.report(window(4), 0, 1, 2)
    assert job.next_persisted() == [window(4)] * WORLD
    job.store.add('complete/4/a', WORLD)
    job.replace(0)
    for rank in (1, 2, 0):
        job.trackers[rank].withdraw_after(window(2))
    # The store has the withdrawal before each rank hears of it.
    wait_for(lambda: all(agreed.persisted == window(2) for agreed in job.agreed))
    job.report(window(4), 0, 1)
    job.wait_until_counted(window(4), 2)
    assert not any(agreed.is_persisted(4) for agreed in job.agreed)
    job.report(window(4), 2)
    wait_for(lambda: all(agreed.persisted == window(4) for agreed in job.agreed))


@pytest.mark.parametrize(
    'withdraw',
    [
        lambda tracker: tracker.withdraw_after(window(0)),
        lambda tracker: tracker.withdraw_unpersisted(),
    ],
    ids=['after_a_window', 'unpersisted'],
)
def test_a_window_about_to_be_published_can_still_be_withdrawn(
    withdraw: Callable[[PersistenceTracker], None],
) -> None:
    """The last rank has counted, and is held up before it publishes."""
    server = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    heard: queue.Queue[Agreed] = queue.Queue()

    def connection() -> TCPStore:
        return TCPStore('127.0.0.1', server.port, is_master=False, timeout=TIMEOUT)

    class Slow(PersistenceTracker):
        def _publish(self, persisted: WindowName) -> None:
            withdraw(first)
            super()._publish(persisted)

        def _replace(self, found: str, standing: object) -> bool:
            if late:
                late.pop()
                withdraw(first)
            return super()._replace(found, standing)  # type: ignore[arg-type]

    first = PersistenceTracker(connection(), 0, 2, heard.put)
    late: list[bool] = []
    last = Slow(connection(), 1, 2, heard.put)
    for start, in_the_middle in ((4, False), (8, True)):
        first.report(window(start))
        wait_for(lambda start=start: server.add(f'complete/{start}/a', 0) == 1)
        if in_the_middle:
            Slow._publish = PersistenceTracker._publish  # type: ignore[method-assign]
            late.append(True)
        last.report(window(start))
        wait_for(lambda start=start: server.add(f'complete/{start}/a', 0) == 1)
        wait_for(lambda: not last._tasks)
        assert heard.empty()
    first.stop()
    last.stop()


def test_a_window_about_to_be_published_can_still_be_given_up() -> None:
    server = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    heard: queue.Queue[Agreed] = queue.Queue()

    class Slow(PersistenceTracker):
        def _publish(self, persisted: WindowName) -> None:
            self._give_up([persisted.start])
            super()._publish(persisted)

    tracker = Slow(server, 0, 1, heard.put)
    tracker.report(window(4))
    assert heard.get(timeout=DEADLINE_S) == Agreed(None, (4,))
    tracker.stop()


def test_window_that_never_completes_is_given_up(job: Job) -> None:
    """Rank 2 never has it. The others skip the windows after it, as they have no file for them."""
    job.report(window(0), 0, 1)
    for start in range(4, 4 * MAX_GIVEN_UP, 4):
        job.trackers[0].give_up([start])
    wait_for(lambda: len(job.agreed[0].given_up) == MAX_GIVEN_UP - 1)
    assert not job.agreed[0].is_given_up(0)
    job.trackers[1].give_up([4 * MAX_GIVEN_UP])
    wait_for(lambda: job.agreed[0].is_given_up(0))
    job.report(window(100), 0, 1, 2)
    assert job.next_persisted() == [window(100)] * WORLD


# Losing the store


def test_a_lost_connection_does_not_end_persistence(caplog: pytest.LogCaptureFixture) -> None:
    server = DistantStore()
    heard: queue.Queue[Agreed] = queue.Queue()
    tracker = PersistenceTracker(server.connect(TIMEOUT), 0, 1, heard.put)
    tracker.report(window(0))
    assert heard.get(timeout=DEADLINE_S) == Agreed(window(0))
    server.cut()
    tracker.report(window(4))
    wait_for(lambda: 'out of reach' in caplog.text)
    server.repair()
    assert heard.get(timeout=DEADLINE_S) == Agreed(window(4))
    assert caplog.text.count('out of reach') == 1
    tracker.stop()


def test_keys_do_not_grow(job: Job) -> None:
    """Not with complete windows, and not with windows that a rank skipped."""
    job.report(window(0), 0, 1, 2)
    job.next_persisted()
    keys = job.store.num_keys()
    for start in range(4, 84, 8):
        job.report(window(start), start // 8 % WORLD)
        job.report(window(start + 4), 0, 1, 2)
        assert job.next_persisted() == [window(start + 4)] * WORLD
    job.replace(1)
    job.report(window(start + 4), 1)
    assert job.persisted[1].get(timeout=DEADLINE_S) == window(start + 4)
    assert job.store.num_keys() == keys
