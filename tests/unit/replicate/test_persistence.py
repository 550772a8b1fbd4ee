# SPDX-License-Identifier: Apache-2.0
import queue
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from moevement_ext.memory.slot import WindowName
from moevement_ext.replicate.persistence import PersistenceBoard
from tests.unit.replicate.peers import wait_for

WORLD = 3
DEADLINE_S = 20.0
"""How long a test waits for something that comes at once."""
TIMEOUT = timedelta(seconds=DEADLINE_S)


class Job:
    """The boards of all ranks, each with its own connection to a real store."""

    def __init__(self) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.persisted: list[queue.Queue[WindowName]] = [queue.Queue() for _ in range(WORLD)]
        self.boards = [self._board(rank) for rank in range(WORLD)]

    def _board(self, rank: int) -> PersistenceBoard:
        store = TCPStore('127.0.0.1', self.store.port, is_master=False, timeout=TIMEOUT)
        return PersistenceBoard(store, rank, WORLD, self.persisted[rank].put)

    def replace(self, rank: int) -> None:
        """Another process of this rank, which knows nothing of the one before."""
        self.boards[rank].stop()
        self.boards[rank] = self._board(rank)

    def wait_until_counted(self, window: WindowName, ranks: int) -> None:
        """Wait until as many ranks have reported a window that is not persisted yet."""
        key = f'complete/{window.start}/{window.plan}'
        wait_for(lambda: self.store.add(key, 0) >= ranks or self.store.check(['persisted']))

    def report(self, window: WindowName, *ranks: int) -> None:
        for rank in ranks:
            self.boards[rank].report(window)

    def next_persisted(self) -> list[WindowName]:
        return [heard.get(timeout=DEADLINE_S) for heard in self.persisted]

    def stop(self) -> None:
        for board in self.boards:
            board.stop()


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


def test_one_missing_rank_holds_a_window_back_but_not_the_next(job: Job) -> None:
    """Rank 2 skipped window 0; had the two reports counted, it would be heard of first."""
    job.report(window(0), 0, 1)
    job.report(window(4), 0, 1, 2)
    assert job.next_persisted() == [window(4)] * WORLD
    assert all(heard.empty() for heard in job.persisted)


def test_windows_of_different_plans_do_not_count_together(job: Job) -> None:
    job.report(window(4, 'a'), 0, 1)
    job.report(window(4, 'b'), 2)
    job.report(window(8), 0, 1, 2)
    assert job.next_persisted() == [window(8)] * WORLD


def test_a_rank_that_reports_a_window_twice_counts_once(job: Job) -> None:
    """As after a recovery, when it is captured again; rank 2 has not got it."""
    job.report(window(0), 0, 0, 1, 1)
    job.report(window(2), 0, 1)
    job.wait_until_counted(window(2), 2)
    assert not job.store.check(['persisted'])
    job.report(window(4), 0, 1, 2)
    assert job.next_persisted() == [window(4)] * WORLD
    assert all(heard.empty() for heard in job.persisted)


def test_a_process_that_takes_the_place_of_another_does_not_count_again(job: Job) -> None:
    job.report(window(0), 0, 1)
    job.wait_until_counted(window(0), 2)
    job.replace(1)
    job.report(window(0), 1)
    job.report(window(2), 1)
    job.wait_until_counted(window(2), 1)
    assert not job.store.check(['persisted'])
    job.report(window(4), 0, 1, 2)
    assert job.next_persisted() == [window(4)] * WORLD
    assert all(heard.empty() for heard in job.persisted)


def test_what_a_process_had_reported_counts_for_the_one_in_its_place(job: Job) -> None:
    job.report(window(0), 0, 1)
    job.wait_until_counted(window(0), 2)
    job.replace(1)
    job.report(window(0), 1, 2)
    assert job.next_persisted() == [window(0)] * WORLD


def test_a_new_process_hears_what_is_persisted_already(job: Job) -> None:
    job.report(window(0), 0, 1, 2)
    job.next_persisted()
    job.replace(1)
    job.report(window(0), 1)
    assert job.persisted[1].get(timeout=DEADLINE_S) == window(0)
    job.report(window(4), 0, 1, 2)
    assert job.next_persisted() == [window(4)] * WORLD


def test_a_rank_that_reports_nothing_now_still_hears_when_it_does(job: Job) -> None:
    job.report(window(0), 0, 1, 2)
    job.next_persisted()
    job.report(window(4), 0, 1)
    job.report(window(4), 2)
    assert job.next_persisted() == [window(4)] * WORLD


def test_keys_do_not_grow(job: Job) -> None:
    """Not with complete windows, and not with windows that a rank skipped."""
    job.report(window(0), 0, 1, 2)
    job.next_persisted()
    keys = job.store.num_keys()
    for start in range(4, 84, 8):
        job.report(window(start), start // 8 % WORLD)
        job.report(window(start + 4), 0, 1, 2)
        assert job.next_persisted() == [window(start + 4)] * WORLD
    assert job.store.num_keys() == keys


def test_a_failing_callback_does_not_end_the_board() -> None:
    heard: queue.Queue[WindowName] = queue.Queue()

    def fail_once(persisted: WindowName) -> None:
        heard.put(persisted)
        if persisted.start == 0:
            raise RuntimeError('callback')

    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    board = PersistenceBoard(store, 0, 1, fail_once)
    for start in (0, 4):
        board.report(window(start))
        assert heard.get(timeout=DEADLINE_S) == window(start)
    board.stop()


def test_keys_do_not_grow_with_replacements() -> None:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)

    def board(rank: int) -> tuple[PersistenceBoard, queue.Queue]:
        heard: queue.Queue = queue.Queue()
        connection = TCPStore('127.0.0.1', store.port, is_master=False)
        return PersistenceBoard(connection, rank, 2, heard.put), heard

    for rank in (0, 1):
        boards = [board(number) for number in (0, 1)]
        for one, _ in boards:
            one.report(WindowName(0, 'a'))
        for one, heard in boards:
            heard.get(timeout=20)
            one.stop()
        if rank == 0:
            before = store.num_keys()
    assert store.num_keys() == before
