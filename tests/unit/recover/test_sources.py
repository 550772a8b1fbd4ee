# SPDX-License-Identifier: Apache-2.0
"""Sources of a window, between real ranks over TCP; it is converted while it is fetched."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.inventory import held_windows
from moevement_ext.recover.sources import ArrivingWindow, VerifiedWindow, make_room, verified_window
from moevement_ext.recover.whole_job import Predecessor, obtain
from moevement_ext.replicate import connection
from moevement_ext.replicate.client import ReaderClosed
from moevement_ext.replicate.secret import of_attempt
from tests.unit.memory.samples import RUN, SECRET, TOPOLOGY, WINDOW, digest, named
from tests.unit.replicate.peers import DEADLINE_S, put_window, silent_peer
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

pytestmark = pytest.mark.timeout(300)

OWN = RankIdentity(RUN, TOPOLOGY, 0)


@pytest.fixture
def job(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(shm, monkeypatch)
    yield job
    job.stop()


@pytest.fixture
def kept(job: Job, tmp_path: Path) -> Iterator[Job]:
    """Window 0 of rank 0 is in its memory, with rank 1 and on disk."""
    disk = job.ranks[0].disk = DiskWindows(tmp_path, 'run1', 0)
    file = job.commit(0)
    replicate(job, file)
    disk.write(file, OWN)
    yield job
    disk.close()


@pytest.fixture
def doubtful(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Rank 0 and two holders of its replicas, on other nodes."""
    job = Job(shm, monkeypatch, ('node-a', 'node-b', 'node-c'))
    yield job
    job.stop()


@pytest.fixture
def arriving(job: Job) -> Iterator[Callable[[], ArrivingWindow]]:
    """Starts to obtain the window; closed at the end."""
    started: list[ArrivingWindow] = []

    def start() -> ArrivingWindow:
        started.append(ArrivingWindow(job.ranks[0], CANDIDATE, job.inventories(), OWN))
        return started[-1]

    yield start
    for window in started:
        window.close()


def replicate(job: Job, file: WindowFile) -> None:
    client = job.ranks[0].peers()[1]
    put_window(client, file)
    client.close()


def predecessor_with(inventories: list[list[HeldWindow]], *usable: Window) -> Predecessor:
    return Predecessor(
        inventories=inventories, on_disk=[], candidates=[*usable], committed=3, dense_iteration=-1
    )


def damage(file: WindowFile, slot: int) -> None:
    file.payload(slot)[0] ^= 1


def bytes_of(source: ArrivingWindow | VerifiedWindow) -> list[bytes]:
    return [source.slot(index)[1].tobytes() for index in range(source.window)]


def payloads(file: WindowFile) -> list[bytes]:
    return [file.payload(slot).tobytes() for slot in range(WINDOW)]


def test_own_window_is_taken_without_a_transfer(job: Job, arriving: Callable) -> None:
    file = job.commit(0)
    expected = payloads(file)
    job.ranks[1].server.stop()
    window = arriving()
    assert (window.name, window.window) == (named(0), WINDOW)
    assert bytes_of(window) == expected
    assert window.file() is file
    assert bytes_of(VerifiedWindow(file)) == expected


@pytest.mark.parametrize('slot', range(WINDOW))
def test_damaged_own_slot_is_replaced(slot: int, job: Job, arriving: Callable) -> None:
    file = job.commit(0)
    expected = payloads(file)
    replicate(job, file)
    damage(file, slot)
    window = arriving()
    assert bytes_of(window) == expected
    assert window.file().verify(Expected(RUN, TOPOLOGY))
    assert len(job.ranks[0].windows.committed()) == 1


def test_slot_in_use_is_not_overwritten(job: Job, arriving: Callable) -> None:
    file = job.commit(0)
    replicate(job, file)
    damage(file, 1)
    window = arriving()
    window.slot(0)
    window._thread.join(0.2)
    assert window._thread.is_alive()
    assert job.ranks[0].windows.file(named(0)) is file
    window.slot(1)
    assert window.file().verify(Expected(RUN, TOPOLOGY))


def test_unavailable_window_is_refused_with_every_reason(job: Job, arriving: Callable) -> None:
    with pytest.raises(RefusedWindow, match='window 0: no holder'):
        arriving().slot(0)
    claimed = [[HeldWindow(CANDIDATE, 0)]] * 2
    with pytest.raises(RefusedWindow, match='window 0: rank 0: .*; rank 1: '):
        verified_window(job.ranks[0], CANDIDATE, claimed, OWN)
    damage(job.commit(0), 2)
    window = arriving()
    window.slot(1)
    with pytest.raises(RefusedWindow, match='own memory: .*slot 2: checksum'):
        window.slot(2)
    assert job.commit(0).name == named(0)  # the failed attempts left their files free


@pytest.mark.parametrize(
    'identity', [RankIdentity('other', TOPOLOGY, 0), RankIdentity(RUN, 'other', 0)]
)
def test_window_of_another_run_is_refused(identity: RankIdentity, kept: Job) -> None:
    seen: list[SlotHeader] = []
    memory, found = kept.ranks[0], 'expected .other.*'
    assert memory.disk is not None
    assert held_windows(memory.store, identity, memory.disk.path) == []
    with pytest.raises(
        RefusedWindow, match=f'own memory: .*{found}rank 1: .*{found}disk: .*{found}'
    ):
        verified_window(
            memory, CANDIDATE, kept.inventories(), identity, lambda _, head: seen.append(head)
        )
    assert seen == []


def test_close_wakes_a_waiting_reader(job: Job, arriving: Callable) -> None:
    replicate(job, job.commit(0))
    inventories = job.inventories()
    job.ranks[0].windows.discard(named(0))
    peer = silent_peer(greets=True, secret=of_attempt(SECRET, SECRET))
    with peer as address, ThreadPoolExecutor() as pool:
        job.ranks[0].addresses[1] = address
        window = ArrivingWindow(job.ranks[0], CANDIDATE, [[], inventories[1]], OWN)
        taken = pool.submit(window.slot, 0)
        with window._changed:
            assert window._changed.wait_for(lambda: window._awaited is not None, 20.0)
        window.close()
        with pytest.raises(ReaderClosed):
            taken.result(20.0)
    assert not window._thread.is_alive()
    assert job.commit(0).name == named(0)  # the file is free


# The disk is the last source


def on_disk(job: Job) -> Path:
    disk = job.ranks[0].disk
    assert disk is not None
    return disk.stored()[0].path


def own(job: Job) -> WindowFile:
    file = job.ranks[0].windows.file(named(0))
    assert file is not None
    return file


def test_memory_precedes_replicas_and_replicas_precede_the_disk(kept: Job) -> None:
    expected, memory = payloads(own(kept)), kept.ranks[0]
    for where in ('own memory', 'rank 1', 'disk'):
        file, source = verified_window(memory, CANDIDATE, kept.inventories(), OWN)
        assert (source, payloads(file)) == (where, expected)
        assert memory.windows.file(named(0)) is file, 'it is in memory again'
        memory.windows.discard(named(0))
        if where == 'rank 1':
            kept.ranks[1].server.stop()


def test_a_damaged_window_on_disk_is_refused_and_its_file_in_memory_is_free(kept: Job) -> None:
    kept.ranks[0].windows.discard(named(0))
    content = bytearray(on_disk(kept).read_bytes())
    content[70_000] ^= 1
    on_disk(kept).write_bytes(content)
    for _ in range(3):
        with pytest.raises(RefusedWindow, match='disk: .*checksum mismatch'):
            verified_window(kept.ranks[0], CANDIDATE, [], OWN)
    assert kept.commit(0).name == named(0)


@pytest.mark.parametrize(
    ('usable', 'left'),
    [((0, 3), [3]), ((3,), [3]), ((0,), [0]), ((), [3])],
    ids=['oldest', 'no candidate', 'no candidate, though newer', 'none is'],
)
def test_room_for_a_fetched_window(usable: tuple[int, ...], left: list[int], kept: Job) -> None:
    windows = kept.ranks[0].windows
    kept.commit(0, start=3)
    assert windows.begin(named(9)) is None
    make_room(windows, Window(named(3), WINDOW), [])  # which is there
    assert [window.name.start for window in windows.committed()] == [3, 0]
    wanted = Window(named(9), WINDOW)
    make_room(windows, wanted, [wanted, *(Window(named(start), WINDOW) for start in usable)])
    assert [window.name.start for window in windows.committed()] == left
    assert windows.begin(named(9)) is not None


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


def test_hung_read_harms_no_successor(kept: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, '_TO_END_S', 0.1)
    memory, file = kept.ranks[0], kept.commit(0, start=3)
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


# Replicas that are damaged in the memory of their holders

NEXT = Window(named(WINDOW), WINDOW)


def lose(job: Job, start: int, damaged: tuple[int, ...]) -> str:
    """Digest of a window that rank 0 has no more, with damaged replicas at some holders."""
    file = job.commit(0, start)
    before = digest(file.path)
    for holder, client in job.ranks[0].peers().items():
        put_window(client, file)
        client.close()
        if holder in damaged:
            held = job.ranks[holder]._inboxes[0].windows.file(named(start))
            assert held is not None
            payload = held.payload(1)
            payload.flags.writeable = True
            payload[0] ^= 1
    job.ranks[0].windows.discard(named(start))
    return before


def test_an_older_window_is_taken_where_every_replica_is_damaged(doubtful: Job) -> None:
    before = lose(doubtful, 0, damaged=())
    lose(doubtful, WINDOW, damaged=(1, 2))
    with pytest.raises(RefusedWindow, match='rank 1: .*slot 1: checksum.*rank 2: .*slot 1: chec'):
        verified_window(doubtful.ranks[0], NEXT, doubtful.inventories(), OWN)
    exchange = SimpleNamespace(all_agree=lambda name, mine: mine)
    events = SimpleNamespace(emit=lambda event: None)
    rank = SimpleNamespace(number=0, identity=OWN, exchange=exchange, events=events)
    predecessor = predecessor_with(doubtful.inventories(), NEXT, CANDIDATE)
    found = obtain(doubtful.ranks[0], predecessor, rank, lambda header: None)  # type: ignore[arg-type]
    assert found is not None and found.tier == 'rank 1'
    file = doubtful.ranks[0].windows.file(named(0))
    assert file is not None and digest(file.path) == before
