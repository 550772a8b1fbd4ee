# SPDX-License-Identifier: Apache-2.0
"""Disk is the last of a window's sources: real files, two real ranks over TCP."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.recover.inventory import held_windows
from moevement_ext.recover.sources import ArrivingWindow, make_room, verified_window
from moevement_ext.replicate import connection
from tests.unit.memory.samples import RUN, TOPOLOGY, WINDOW, capacity, named, tmpfs_directory
from tests.unit.recover.test_sources import damage, replicate
from tests.unit.replicate.peers import DEADLINE_S
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

pytestmark = pytest.mark.timeout(300)

OWN = RankIdentity(RUN, TOPOLOGY, 0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Window 0 of rank 0 is in its memory, with rank 1 and on disk."""
    with tmpfs_directory() as shm:
        job = Job(Path(shm), monkeypatch)
        disk = job.ranks[0].disk = DiskWindows(tmp_path, 'run1', 0)
        file = job.commit(0)
        replicate(job, file)
        disk.write(file, OWN)
        yield job
        job.stop()
        disk.close()


def on_disk(job: Job) -> Path:
    disk = job.ranks[0].disk
    assert disk is not None
    return disk.stored()[0].path


def own(job: Job) -> WindowFile:
    file = job.ranks[0].windows.file(named(0))
    assert file is not None
    return file


def payloads(file: WindowFile) -> list[bytes]:
    return [file.payload(slot).tobytes() for slot in range(WINDOW)]


def test_memory_precedes_replicas_and_replicas_precede_the_disk(job: Job) -> None:
    expected, memory = payloads(own(job)), job.ranks[0]
    seen = []
    for _ in range(3):
        file, source = verified_window(memory, CANDIDATE, job.inventories(), OWN)
        assert payloads(file) == expected
        seen.append(source)
        if source == 'own memory':
            memory.windows.discard(named(0))
        elif source == 'rank 1':
            memory.windows.discard(named(0))
            job.ranks[1].server.stop()
    assert seen == ['own memory', 'rank 1', 'disk']
    assert memory.windows.file(named(0)) is file, 'it is in memory again'


def test_disk_is_used_when_memory_is_damaged_and_no_replica_exists(job: Job) -> None:
    expected = payloads(own(job))
    damage(own(job), 1)
    arrived: list[int] = []
    file, source = verified_window(
        job.ranks[0], CANDIDATE, [], OWN, lambda file, header: arrived.append(header.slot)
    )
    assert source == 'disk' and payloads(file) == expected
    assert arrived == [0, 0, 1, 2]


def test_longer_window_of_an_earlier_start_is_read_from_disk(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, shm = payloads(own(job)), job.ranks[0].store.root
    memory = job.begin_again(shm, monkeypatch, capacity(window=1))
    file, source = verified_window(memory, CANDIDATE, [], OWN)
    assert source == 'disk' and payloads(file) == expected


def test_a_damaged_window_on_disk_is_refused_and_its_file_in_memory_is_free(job: Job) -> None:
    job.ranks[0].windows.discard(named(0))
    content = bytearray(on_disk(job).read_bytes())
    content[70_000] ^= 1
    on_disk(job).write_bytes(content)
    for _ in range(3):
        with pytest.raises(RefusedWindow, match='disk: .*checksum mismatch'):
            verified_window(job.ranks[0], CANDIDATE, [], OWN)
    assert job.commit(0).name == named(0)


@pytest.mark.parametrize(
    'identity', [RankIdentity('other', TOPOLOGY, 0), RankIdentity(RUN, 'other', 0)]
)
def test_windows_of_another_run_on_disk_are_refused(identity: RankIdentity, job: Job) -> None:
    job.ranks[0].windows.discard(named(0))
    disk = job.ranks[0].disk
    assert disk is not None
    assert held_windows(job.ranks[0].store, identity, disk.path) == []
    with pytest.raises(RefusedWindow, match='disk: .*expected .other'):
        verified_window(job.ranks[0], CANDIDATE, [], identity)


def test_list_of_the_disk_omits_torn_windows(job: Job) -> None:
    disk = job.ranks[0].disk
    assert disk is not None
    store = job.ranks[0].store
    assert held_windows(store, OWN, disk.path) == [HeldWindow(CANDIDATE, 0)]
    os.truncate(on_disk(job), 70_000)
    assert held_windows(store, OWN, disk.path) == []


@pytest.mark.parametrize(
    ('usable', 'left'),
    [((0, 3), [3]), ((3,), [3]), ((0,), [0]), ((), [3])],
    ids=['oldest', 'no candidate', 'no candidate, though newer', 'none is'],
)
def test_room_is_made_for_a_window_of_another_holder(
    usable: tuple[int, ...], left: list[int], job: Job
) -> None:
    """The node was away: it has windows that the job left behind."""
    windows = job.ranks[0].windows
    job.commit(0, start=3)
    assert windows.begin(named(9)) is None
    wanted = Window(named(9), WINDOW)
    make_room(windows, wanted, [wanted, *(Window(named(start), WINDOW) for start in usable)])
    assert [window.name.start for window in windows.committed()] == left
    assert windows.begin(named(9)) is not None


def test_window_already_in_memory_needs_no_room(job: Job) -> None:
    windows = job.ranks[0].windows
    job.commit(0, start=3)
    make_room(windows, Window(named(3), WINDOW), [])
    assert [window.name.start for window in windows.committed()] == [3, 0]


class HungReads:
    """The read number `index` of a payload waits until its event is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *indices: int) -> None:
        self.reached = {index: threading.Event() for index in indices}
        self.go_on = {index: threading.Event() for index in indices}
        self._count = 0
        self._from = WindowReader._from
        monkeypatch.setattr(WindowReader, '_from', lambda *place: self._reader(*place))

    def _reader(self, reader: WindowReader, offset: int) -> Callable[[memoryview], None]:
        fill, index = self._from(reader, offset), self._count
        self._count += 1

        def read(view: memoryview) -> None:
            if index in self.go_on:
                self.reached[index].set()
                self.go_on[index].wait(DEADLINE_S)
            fill(view)

        return read


def test_hung_read_that_ends_late_leaves_its_successor_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads window 0 hangs, and is left behind; the next one reads window 3."""
    monkeypatch.setattr(connection, '_TO_END_S', 0.1)
    memory, file = job.ranks[0], job.commit(0, start=3)
    assert memory.disk is not None
    memory.disk.write(file, OWN)
    memory.disk_only, expected = True, payloads(file)
    reads = HungReads(monkeypatch, 0, 2)
    left = ArrivingWindow(memory, CANDIDATE, [], OWN)
    assert reads.reached[0].wait(DEADLINE_S)
    left.close()
    window = ArrivingWindow(memory, Window(named(3), WINDOW), [], OWN)
    assert reads.reached[2].wait(DEADLINE_S)
    assert memory.windows.begin(named(6)) is None, 'two threads write'
    reads.go_on[0].set()
    left._thread.join(DEADLINE_S)
    assert not left._thread.is_alive()
    reads.go_on[2].set()
    try:
        assert payloads(window.file()) == expected
    finally:
        window.close()
    assert memory.windows.begin(named(6)) is not None, 'both have ended'
