# SPDX-License-Identifier: Apache-2.0
"""Windows that are converted while they are fetched, between two real ranks over TCP."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.name import HeldWindow, RankIdentity
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.sources import (
    ArrivingWindow,
    VerifiedWindow,
    verified_window,
)
from moevement_ext.replicate import connection, greeting
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.log_reader import ReaderClosed
from moevement_ext.replicate.protocol import SlotHead, WindowHead
from moevement_ext.replicate.secret import of_attempt
from tests.unit.memory.samples import (
    RUN,
    SECRET,
    TOPOLOGY,
    WINDOW,
    capacity,
    digest,
    named,
    tmpfs_directory,
)
from tests.unit.replicate.peers import DEADLINE_S, put_window, silent_peer
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

pytestmark = pytest.mark.timeout(300)

OWN = RankIdentity(RUN, TOPOLOGY, 0)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with tmpfs_directory() as shm:
        job = Job(Path(shm), monkeypatch)
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


def damage(file: WindowFile, slot: int) -> None:
    file.payload(slot)[0] ^= 1


def bytes_of(source: ArrivingWindow | VerifiedWindow) -> list[bytes]:
    return [source.slot(index)[1].tobytes() for index in range(source.window)]


def test_own_window_is_taken_without_a_transfer(job: Job, arriving: Callable) -> None:
    file = job.commit(0)
    expected = [file.payload(slot).tobytes() for slot in range(WINDOW)]
    job.ranks[1].server.stop()
    window = arriving()
    assert (window.name, window.window) == (named(0), WINDOW)
    assert bytes_of(window) == expected
    assert window.file() is file
    assert bytes_of(VerifiedWindow(file)) == expected


def test_lost_window_is_fetched_from_its_holder_and_kept(job: Job, arriving: Callable) -> None:
    file = job.commit(0)
    expected = digest(file.path)
    replicate(job, file)
    job.ranks[0].windows.discard(named(0))
    window = arriving()
    assert [window.slot(index)[0].slot for index in range(WINDOW)] == list(range(WINDOW))
    assert digest(window.file().path) == expected
    assert job.ranks[0].windows.file(named(0)) is window.file()


@pytest.mark.parametrize('slot', range(WINDOW))
def test_damaged_own_slot_is_replaced_once_the_ones_before_are_used(
    slot: int, job: Job, arriving: Callable
) -> None:
    file = job.commit(0)
    expected = [file.payload(index).tobytes() for index in range(WINDOW)]
    replicate(job, file)
    damage(file, slot)
    window = arriving()
    for index in range(WINDOW):
        _, payload = window.slot(index)
        assert payload.tobytes() == expected[index]
    assert window.file().verify(Expected(RUN, TOPOLOGY))
    assert len(job.ranks[0].windows.committed()) == 1


def test_slot_in_use_is_not_overwritten(job: Job, arriving: Callable) -> None:
    """The reader still holds slot 0 when the damage of slot 1 is found."""
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
def test_window_of_another_run_is_refused(identity: RankIdentity, job: Job) -> None:
    replicate(job, job.commit(0))
    seen: list[SlotHeader] = []
    with pytest.raises(RefusedWindow, match='own memory: .*expected .other.*rank 1: .*expected'):
        verified_window(
            job.ranks[0], CANDIDATE, job.inventories(), identity, lambda _, head: seen.append(head)
        )
    assert seen == []


def test_close_wakes_a_waiting_reader(job: Job, arriving: Callable) -> None:
    """The only holder has accepted the connection, and then says nothing."""
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


@contextlib.contextmanager
def unreachable_peer() -> Iterator[tuple[str, int]]:
    """No process accepts or refuses a connection any more, as on a node without power."""
    listener = socket.create_server(('127.0.0.1', 0), backlog=0)
    kept = []
    with contextlib.suppress(TimeoutError):
        while True:
            kept.append(socket.create_connection(listener.getsockname(), timeout=0.5))
    yield listener.getsockname()
    for sock in (listener, *kept):
        sock.close()


def test_abandoned_connection_does_not_block_the_next(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have met anew, and the replica is fetched from a holder that answers."""
    monkeypatch.setattr(connection, '_TO_END_S', 0.3)
    file = job.commit(0)
    expected = digest(file.path)
    replicate(job, file)
    inventories, memory = job.inventories(), job.ranks[0]
    memory.windows.discard(named(0))
    answering = memory.addresses[1]
    with unreachable_peer() as address:
        memory.addresses[1] = address
        before = ArrivingWindow(memory, CANDIDATE, [[], inventories[1]], OWN)
        before.close()
        assert before._thread.is_alive(), 'it connects'
        memory.addresses[1] = answering
        window = ArrivingWindow(memory, CANDIDATE, [[], inventories[1]], OWN)
        try:
            assert digest(window.file().path) == expected
        finally:
            window.close()
    before._thread.join(DEADLINE_S)
    assert not before._thread.is_alive()
    assert memory.windows.file(named(0)) is window.file()


def test_reader_with_an_unnoticed_arrival_is_not_idle(job: Job, arriving: Callable) -> None:
    """It may go on at any moment, with what must not be overwritten then."""
    job.commit(0)
    window = arriving()
    window.file()
    assert not window._reader_is_idle()
    with window._changed:
        window._awaited = lambda: 0 in window._slots
        assert not window._reader_is_idle()
        window._awaited = lambda: WINDOW in window._slots
        assert window._reader_is_idle()


@contextlib.contextmanager
def odd_holder(serve: Callable[[Connection], None]) -> Iterator[tuple[str, int]]:
    """Knows the secret, and sends something else than a window, however often it is asked."""
    listener = socket.create_server(('127.0.0.1', 0))

    def run() -> None:
        with contextlib.suppress(OSError):  # at the end the listener is shut down
            while True:
                answer(listener.accept()[0])

    def answer(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            connection = Connection(sock)
            connection.set_deadline(DEADLINE_S)
            greeting.admit(connection, of_attempt(SECRET, SECRET))
            serve(connection)

    thread = threading.Thread(target=run)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


@pytest.mark.parametrize('order', [(0, 0), (0, 1023, 5000), (0, 1, 1)])
def test_holder_that_sends_no_window_is_skipped(
    job: Job, arriving: Callable, order: tuple[int, ...]
) -> None:
    """It repeats a slot, or sends one that no window has; the next holder is asked."""
    file = job.commit(0)
    expected = [file.payload(slot).tobytes() for slot in range(WINDOW)]
    replicate(job, file)
    blobs = [(bytes(file.slot_blob(s).payload), bytes(file.slot_blob(s).frame)) for s in range(2)]
    job.ranks[0].windows.discard(named(0))

    def serve(connection: Connection) -> None:
        connection.receive_request()
        connection.send(WindowHead(len(order), capacity()))
        for slot in order:
            payload, frame = blobs[min(slot, 1)]
            connection.send(SlotHead(slot, len(payload), len(frame)))
            connection.send_bytes(payload + frame)
        connection.receive_request()

    with odd_holder(serve) as address:
        memory = job.ranks[0]
        memory.addresses = [memory.addresses[0], address, memory.addresses[1]]
        memory.members.append(memory.members[1])
        inventories = [[], *2 * [job.inventories()[1]]]
        window = ArrivingWindow(memory, CANDIDATE, inventories, OWN)
        try:
            assert bytes_of(window) == expected
        finally:
            window.close()
