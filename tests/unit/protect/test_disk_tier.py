# SPDX-License-Identifier: Apache-2.0
"""Ranks that copy their windows to disks of their own: real files, threads and coordinator."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.events import EventLog
from moevement_ext.memory.disk import KEPT, DiskWindows
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import RankIdentity, WindowName
from moevement_ext.protect.disk_tier import DiskTier
from moevement_ext.protect.statistics import CaptureStatistics
from tests.unit.memory.samples import RUN, TOPOLOGY, capacity, commit, named, tmpfs_directory
from tests.unit.protect.ranks import Promising
from tests.unit.replicate.peers import wait_for

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]

FAST = 1e12
"""Bytes a second."""
DEADLINE_S = 60.0
"""How long a test waits for something that comes at once."""


class Disk(DiskWindows):
    """A disk that can be made to stand still between two chunks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moving = threading.Event()
        self.moving.set()

    def write(self, file: WindowFile, identity: RankIdentity, advance: Any = None) -> None:
        def slowly(nbytes: int) -> None:
            assert self.moving.wait(DEADLINE_S)
            advance(nbytes)

        super().write(file, identity, slowly)


class Rank:
    """One rank: its windows in memory and on disk."""

    def __init__(self, number: int, job: 'Job', bytes_per_s: float) -> None:
        self.identity = RankIdentity(RUN, TOPOLOGY, number)
        store = NodeStore(job.shm, 'run1', f'node{number}')
        self.windows = OwnerWindows(store, number, number, capacity(), holdable=True)
        self.disk = Disk(job.root, 'run1', number)
        self.events = job.root / f'rank{number}.jsonl'
        self.statistics = CaptureStatistics(EventLog(str(job.root), number))
        self.bytes_per_s = bytes_per_s
        self.complete: WindowName | None = None
        self.tier = self.start(job)

    def start(self, job: 'Job') -> DiskTier:
        number = self.identity.rank
        self.tier = DiskTier(
            self.disk, self.windows, self.identity, 1, self.bytes_per_s,
            partial(job.promising.tracker, number, 'disk', kept=KEPT),
            self.statistics, self.complete,
        )  # fmt: skip
        return self.tier

    def persist(self, start: int) -> None:
        """All ranks have the window: others may be overwritten, and it may go to disk."""
        commit(self.windows, start)
        self.windows.persisted(named(start))
        self.tier.persisted(named(start))

    def starts(self) -> list[int]:
        return [window.name.start for window in self.disk.stored()]

    def on_disk(self) -> list[int]:
        """Windows that this rank learned to be on the disks of all."""
        lines = map(json.loads, self.events.read_text().splitlines())
        return [line['start'] for line in lines if line['event'] == 'window_on_disk']


class Job:
    """Some ranks, which may differ in the speed of their disks."""

    def __init__(
        self, shm: Path, root: Path, rates: tuple[float, ...], promising: Promising
    ) -> None:
        self.shm, self.root = shm, root
        self.promising = promising
        self.ranks = [Rank(number, self, rate) for number, rate in enumerate(rates)]
        promising.enter()

    def persist(self, start: int) -> None:
        for rank in self.ranks:
            rank.persist(start)

    def offer(self, start: int) -> None:
        for rank in self.ranks:
            rank.tier.persisted(named(start))

    def wait_for(self, start: int) -> None:
        """The window is on all disks, and all know."""
        wait_for(lambda: all(start in rank.on_disk() for rank in self.ranks))

    @contextmanager
    def recovery(self) -> Iterator[None]:
        """In between, a rank may take back what it has promised, or be another process."""
        self.promising.leave()
        yield
        self.promising.enter()

    def stop(self) -> None:
        for rank in self.ranks:
            rank.tier.stop()
        self.promising.close()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []
    with tmpfs_directory() as shm:

        def start(*rates: float) -> Job:
            made.append(Job(shm, tmp_path, rates, Promising(monkeypatch, len(rates))))
            return made[-1]

        yield start
        for job in made:
            job.stop()


def test_persisted_windows_are_copied_to_disk_and_the_newest_two_stay(
    make: Callable[..., Job],
) -> None:
    job = make(FAST, FAST)
    for start in (0, 3, 6, 9):
        job.persist(start)
        job.wait_for(start)
    wait_for(lambda: all(rank.starts() == [9, 6] for rank in job.ranks))
    assert [rank.on_disk() for rank in job.ranks] == [[0, 3, 6, 9]] * 2
    assert all(rank.statistics.on_disk == 9 for rank in job.ranks)
    for rank in job.ranks:
        wait_for(lambda rank=rank: rank.statistics.disk_bytes == rank.disk.used_bytes() > 0)


def test_disk_that_fails_does_not_end_the_training_thread(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(disk: DiskWindows) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(DiskWindows, 'used_bytes', stale)
    job = make(FAST)
    job.persist(0)
    job.wait_for(0)


def test_nothing_is_pruned_before_all_have_the_newer_one(make: Callable[..., Job]) -> None:
    job = make(FAST, FAST)
    fast, slow = job.ranks
    for start in (0, 3):
        job.persist(start)
        job.wait_for(start)
    slow.disk.moving.clear()
    job.persist(6)
    wait_for(lambda: fast.starts() == [6, 3, 0])
    assert slow.starts() == [3, 0]
    slow.disk.moving.set()
    wait_for(lambda: fast.starts() == slow.starts() == [6, 3])


def test_slow_disk_skips_windows_and_delays_no_rank(
    make: Callable[..., Job],
) -> None:
    """Window 0 is copied, undamaged, while others take turns in the other files."""
    job = make(FAST, FAST)
    slow, fast = job.ranks
    slow.disk.moving.clear()
    job.persist(0)
    wait_for(lambda: list(slow.disk.path.glob('writing-0-*')) and fast.starts() == [0])
    for start in range(3, 36, 3):
        job.persist(start)  # a file is free each time, and none waits
    assert slow.on_disk() == fast.on_disk() == []
    slow.disk.moving.set()
    job.wait_for(0)
    job.wait_for(33)
    assert slow.on_disk() == fast.on_disk() == [0, 33]
    assert slow.statistics.failures == fast.statistics.failures == 0


def test_windows_on_disk_keep_the_configured_interval(make: Callable[..., Job]) -> None:
    job = make(FAST)
    (rank,) = job.ranks
    rank.tier._every = 7
    for start in range(0, 24, 3):
        job.persist(start)
        if start in (0, 9, 18):
            job.wait_for(start)
    assert rank.on_disk() == [0, 9, 18]


def kept_last(job: Job, start: int) -> list[bool]:
    with ThreadPoolExecutor() as threads:
        calls = [
            threads.submit(rank.tier.keep_last, named(start), DEADLINE_S) for rank in job.ranks
        ]
        return [call.result() for call in calls]


def test_last_window_is_copied_at_once_regardless_of_limits(make: Callable[..., Job]) -> None:
    """The copy of another one, which would take hours, ends for it."""
    job = make(1.0, 1.0)
    for rank in job.ranks:
        rank.tier._every = 7
    job.persist(0)
    wait_for(lambda: all(rank.tier._pending is not None for rank in job.ranks))
    job.persist(3)
    assert kept_last(job, 3) == [True, True]
    assert [rank.starts() for rank in job.ranks] == [[3], [3]]


def test_hung_disk_does_not_delay_the_end_of_a_job(
    make: Callable[..., Job],
) -> None:
    job = make(FAST)
    (rank,) = job.ranks
    rank.disk.moving.clear()
    job.persist(0)
    assert not rank.tier.keep_last(named(0), 0.1)
    rank.disk.moving.set()


def test_a_window_that_one_rank_cannot_copy_is_given_up_by_all(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(FAST, FAST)
    job.persist(0)
    job.wait_for(0)
    broken, well = job.ranks
    broken.disk.path.rename(broken.disk.path.with_name('away'))  # its file system is gone
    job.persist(3)
    wait_for(lambda: broken.statistics.failures > 0 and well.tier._pending is None)
    wait_for(lambda: well.starts() == [0])
    broken.disk.path.with_name('away').rename(broken.disk.path)
    job.persist(6)
    job.wait_for(6)
    assert well.starts() == broken.starts() == [6, 0]


def test_window_that_another_rank_skipped_is_dropped(make: Callable[..., Job]) -> None:
    """Rank 1 learned of window 3 only, rank 0 of window 0: both go on with one that both have."""
    job = make(FAST, FAST)
    first, second = job.ranks
    first.persist(0)
    wait_for(lambda: first.starts() == [0])
    second.persist(3)
    wait_for(lambda: first.starts() == [])
    first.persist(3)
    job.wait_for(3)
    assert first.starts() == second.starts() == [3]


def test_after_a_rollback_later_windows_are_set_aside_and_the_next_is_copied(
    make: Callable[..., Job],
) -> None:
    job = make(FAST, FAST)
    for start in (0, 3):
        job.persist(start)
        job.wait_for(start)
    back, other = job.ranks
    with job.recovery():
        back.tier.withdraw_after(named(0))
    back.windows.discard_after(0)
    assert back.starts() == [0]
    assert list(back.disk.path.glob('aside-3-*'))
    commit(back.windows, 3)
    back.windows.persisted(named(3))
    job.offer(3)  # the other has it, and does not copy it again
    wait_for(lambda: back.starts() == [3, 0])
    job.persist(6)
    job.wait_for(6)
    wait_for(lambda: back.starts() == other.starts() == [6, 3])


def test_rollback_ends_the_copy_of_a_withdrawn_window(make: Callable[..., Job]) -> None:
    job = make(1.0)
    (rank,) = job.ranks
    rank.persist(3)
    wait_for(lambda: list(rank.disk.path.glob('writing-3-*')) and rank.tier._pending == named(3))
    with job.recovery():
        rank.tier.withdraw_after(WindowName(0, 'plan1'))
    rank.windows.discard_after(0)
    assert names(rank) == []
    rank.tier._bytes_per_s = FAST
    rank.persist(6)
    job.wait_for(6)


def test_failed_set_aside_is_retried_before_any_copy(make: Callable[..., Job]) -> None:
    """Else a part of a past that is not continued would meet parts that are captured anew."""
    job = make(FAST, FAST)
    for start in (0, 3):
        job.persist(start)
        job.wait_for(start)
    back, other = job.ranks
    hindrance = back.disk.path / 'aside-3-plan1.window'
    hindrance.mkdir()
    with job.recovery():
        for rank in job.ranks:
            rank.tier.withdraw_after(named(0))
            rank.windows.discard_after(0)
    assert (back.starts(), other.starts()) == ([3, 0], [0])
    job.persist(3)
    wait_for(lambda: back.statistics.failures == 2 and other.tier._pending is None)
    wait_for(lambda: other.starts() == [0])
    hindrance.rmdir()
    job.persist(6)
    job.wait_for(6)
    assert back.starts() == other.starts() == [6, 0]


def names(rank: Rank) -> list[str]:
    return sorted(
        path.name for path in rank.disk.path.iterdir() if path.name not in ('lock', 'complete')
    )


def test_new_process_continues_the_copies_of_its_predecessor(make: Callable[..., Job]) -> None:
    job = make(FAST, FAST)
    for start in (0, 3):
        job.persist(start)
        job.wait_for(start)
    lost, other = job.ranks
    lost.tier.stop()
    (lost.disk.path / 'writing-6-plan1.window').touch()
    lost.disk.close()
    lost.disk = Disk(job.root, 'run1', 0)
    with job.recovery():
        job.promising.replace(0)
        lost.start(job)
    wait_for(lambda: lost.tier._complete == [named(3)])
    job.persist(6)
    job.wait_for(6)
    wait_for(lambda: names(lost) == [f'window-{start}-plan1.window' for start in (3, 6)])
    wait_for(lambda: other.starts() == [6, 3])


def test_new_attempt_keeps_the_window_that_it_resumed_from(
    make: Callable[..., Job], tmp_path: Path
) -> None:
    job = make(FAST)
    (rank,) = job.ranks
    for start in (0, 3):
        job.persist(start)
        job.wait_for(start)
    rank.tier.stop()
    rank.complete = named(3)
    with job.recovery():
        job.promising.replace(0)
        rank.start(job)
    assert rank.statistics.on_disk == 3
    rank.tier.persisted(named(3))  # it is there
    job.persist(6)
    job.wait_for(6)
    wait_for(lambda: rank.starts() == [6, 3])


def test_a_rank_that_stops_does_not_wait_for_its_copy(make: Callable[..., Job]) -> None:
    job = make(1.0)
    job.persist(0)
    (rank,) = job.ranks
    wait_for(lambda: rank.tier._pending is not None)
    rank.tier.stop()
    assert not rank.tier._thread.is_alive()
    assert names(rank) == []


def test_a_held_file_is_neither_overwritten_nor_missed(make: Callable[..., Job]) -> None:
    job = make(FAST)
    (rank,) = job.ranks
    windows = rank.windows
    commit(windows, 0)
    windows.persisted(named(0))
    held = windows.hold(named(0))
    assert held is not None
    content = held.array.tobytes()
    for start in (3, 6, 9):
        commit(windows, start)
        assert windows.begin(named(start + 90)) is None, 'two take turns, as without a disk'
        windows.persisted(named(start))
    assert held.array.tobytes() == content and held.held
    with pytest.raises(ValueError, match='only one'):
        windows.hold(named(9))
    windows.release(held)
    commit(windows, 12)
    windows.persisted(named(12))
    commit(windows, 15)
    assert windows.file(named(0)) is None, 'its file is used again'
