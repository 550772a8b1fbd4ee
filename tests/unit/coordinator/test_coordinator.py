# SPDX-License-Identifier: Apache-2.0
"""Coordinator and clients on real sockets: strangers, cut and slow connections, another process."""

import asyncio
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from moevement_ext.coordinator import coordinator as servers
from moevement_ext.coordinator import coordinator_client as clients
from moevement_ext.coordinator import statements
from moevement_ext.coordinator.coordinator_client import CoordinatorClient
from moevement_ext.coordinator.statements import (
    TO_RANK,
    AllSaid,
    Beat,
    Fenced,
    Hello,
    JobStart,
    Promises,
    RoundMet,
    RoundOver,
    RoundPhase,
    RoundPlace,
    Settled,
    Show,
    Shown,
    framed,
)
from moevement_ext.memory.window.name import NOTHING_AGREED, Agreed, WindowName
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.secret import introduce
from tests.unit.coordinator.served import Served

SECRET = b's' * 32
W2 = WindowName(2, 'h_p')
SOON_S = 20.0


class Rank:
    """A client, and all news that it has heard."""

    def __init__(self, address: tuple[str, int], hello: Hello) -> None:
        self.news: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.client = CoordinatorClient(address, SECRET, hello, self.news.put, lambda: Beat(5))

    def hears(self, kind: type) -> Any:
        until = time.monotonic() + SOON_S
        while True:
            found = self.news.get(timeout=max(until - time.monotonic(), 0.01))
            if isinstance(found, kind):
                return found

    @property
    def silent(self) -> bool:
        return self.news.empty()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(('127.0.0.1', 0), backlog=128) as found:
        yield found


@pytest.fixture
def serve(listening: socket.socket) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(**more: Any) -> Served:
        made.append(Served(listening, SECRET, **more))
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def rank(listening: socket.socket) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def start(
        number: int, size: int = 2, token: int = 0, attempt: int = 0, silent_s: float = 0.0
    ) -> Rank:
        job = JobStart(attempt, size, '')
        hello = Hello(number, token or 2**number, job, silent_s=silent_s)
        made.append(Rank(listening.getsockname()[:2], hello))
        return made[-1]

    yield start
    for one in made:
        one.client.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, '_LOOK_S', 0.05)
    monkeypatch.setattr(servers, 'LEARNING_S', 1.0)
    monkeypatch.setattr(servers, 'TO_RECONNECT_S', 0.3)
    monkeypatch.setattr(clients, 'BEAT_S', 0.1)


def met(*ranks: Rank) -> tuple[int, int]:
    for number, one in enumerate(ranks):
        one.client.join(b'%d' % number)
    found = [one.hears(RoundMet) for one in ranks]
    assert found == [found[0]] * len(ranks)
    return found[0].number, found[0].roster


def promise(one: Rank, about: tuple[int, int], window: WindowName = W2) -> None:
    def change(old: Promises) -> Promises:
        return old.with_window(window, NOTHING_AGREED)

    one.client.promise(about, 'memory', change)


def wait_until(condition: Callable[[], object], most_s: float = SOON_S) -> None:
    until = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def connected(listening: socket.socket) -> Connection:
    """A peer that has greeted, and nothing more."""
    connection = Connection(socket.create_connection(listening.getsockname()[:2]))
    connection.set_deadline(SOON_S)
    assert introduce(connection, SECRET) is None
    return connection


def test_ranks_meet_promise_pass_and_ask(serve: Callable, rank: Callable) -> None:
    serve(rules={'load': b'-'.join})
    ranks = [rank(0), rank(1)]
    about = met(*ranks)
    assert about == (1, 3)
    for one in ranks:
        promise(one, about)
        one.client.say('address', b'a')
        one.client.say('load', b'l', about)
        one.client.say('other round', b'', (0, 0))
    for one in ranks:
        assert one.hears(Settled) == Settled(about, 'memory', Agreed(W2))
        assert one.hears(AllSaid) == AllSaid(about, 'load', b'l-l')
    asked = ranks[0].client.ask('address', [0, 1, 5])
    assert asked.result(SOON_S) == {0: b'a', 1: b'a'}
    ranks[1].client.leave(1, 'an error')
    assert ranks[0].hears(RoundOver) == RoundOver(1, 'an error')
    assert met(*ranks) == (2, 3)


def test_another_coordinator_behind_the_same_socket_concludes_the_same(
    serve: Callable, rank: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, 'LEARNING_S', 10.0)
    first = serve()
    ranks = [rank(0), rank(1)]
    about = met(*ranks)
    promise(ranks[0], about)
    first.stop()
    ranks[1].client._post(lambda: time.sleep(1.0))  # it connects later than the other
    promise(ranks[1], about)
    asked = ranks[0].client.ask('fact', [1])
    ranks[1].client.say('fact', b'f')
    serve()
    assert [one.hears(Settled) for one in ranks] == [Settled(about, 'memory', Agreed(W2))] * 2
    assert asked.result(SOON_S) in ({1: b'f'}, {})
    assert all(one.silent for one in ranks)  # no round has ended, for want of a rank


SERVES = """
import asyncio, socket, sys
from moevement_ext.coordinator.coordinator import Coordinator
listening = socket.socket(fileno=int(sys.argv[1]))
asyncio.run(Coordinator(b's' * 32, b'+'.join).serve(listening))
"""


@pytest.mark.parametrize('end', [signal.SIGKILL, signal.SIGSTOP])
def test_killed_process_is_replaced(
    end: signal.Signals, rank: Callable, listening: socket.socket
) -> None:
    """SIGSTOP: the process stands still for some seconds, and goes on."""

    def started() -> subprocess.Popen:
        fd = listening.fileno()
        return subprocess.Popen([sys.executable, '-c', SERVES, str(fd)], pass_fds=[fd])

    serving = [started()]
    ranks = [rank(number, silent_s=1.0) for number in range(2)]
    try:
        about = met(*ranks)
        promise(ranks[0], about)
        serving[0].send_signal(end)
        promise(ranks[1], about)
        time.sleep(2.5)
        if end is signal.SIGKILL:
            serving.append(started())
        else:
            serving[0].send_signal(signal.SIGCONT)
        for one in ranks:
            assert one.hears(Settled).agreed == Agreed(W2)
        time.sleep(1.5)
        assert all(one.silent for one in ranks)
    finally:
        for process in serving:
            process.kill()
            process.wait()


def test_standing_still_in_a_conclusion_delays_no_other(serve: Callable, rank: Callable) -> None:
    pauses_s = [1.0]

    def stands_still(values: Any) -> bytes:
        time.sleep(pauses_s.pop() if pauses_s else 0.0)
        return b''

    serve(rules={'load': stands_still})
    ranks = [rank(0), rank(1)]
    about = met(*ranks)
    for one in ranks:
        one.client.say('load', b'', about)
    assert ranks[0].hears(AllSaid)
    began = time.monotonic()
    for one in ranks:
        promise(one, about)
    assert ranks[0].hears(Settled) and time.monotonic() - began < 3.0


@pytest.mark.parametrize('still_s', [0.0, 1.0])
def test_cut_connection_costs_no_round(
    still_s: float, serve: Callable, rank: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the coordinator stands still before it can see the new connection."""
    monkeypatch.setattr(servers, '_MOST_BETWEEN_LOOKS_S', 0.5)
    serving = serve()
    ranks = [rank(0), rank(1)]
    about = met(*ranks)

    def cut() -> None:
        serving.coordinator._peers[0].cut()
        serving.loop.call_later(0.02, time.sleep, still_s)

    serving.loop.call_soon_threadsafe(cut)
    time.sleep(0.5 + still_s)
    for one in ranks:
        promise(one, about)
    assert [one.hears(Settled).agreed for one in ranks] == [Agreed(W2)] * 2
    assert all(one.silent for one in ranks)


@pytest.mark.parametrize('how', ['gone', 'silent'])
def test_lost_rank_ends_the_round(how: str, serve: Callable, rank: Callable) -> None:
    woken = threading.Event()
    serve()
    ranks = [rank(0, silent_s=0.5), rank(1)]
    met(*ranks)
    lost = ranks[0].client
    if how == 'gone':
        lost._post(lost._task.cancel)
    else:
        lost._post(lambda: woken.wait(SOON_S))
    assert ranks[1].hears(RoundOver) == RoundOver(1, 'rank 0 is lost')
    woken.set()


def test_rank_that_has_ended_is_not_missed(serve: Callable, rank: Callable) -> None:
    serve()
    ranks = [rank(0), rank(1)]
    met(*ranks)
    ranks[0].client.close()
    time.sleep(1.0)
    assert ranks[1].silent


def test_new_process_takes_the_rank_of_one_that_is_not_gone(
    serve: Callable, rank: Callable
) -> None:
    serve()
    ranks = [rank(0), rank(1)]
    met(*ranks)
    new = rank(1, token=8)
    assert ranks[1].hears(Fenced).why == 'another process has taken its rank'
    assert ranks[0].hears(RoundOver) == RoundOver(1, 'rank 1 has a new process')
    assert met(ranks[0], new) == (2, 9)
    ranks[1].client.join(b'')
    assert not ranks[1].client._thread.is_alive() or ranks[1].client._fenced


def test_later_attempt_of_the_job_ends_the_processes_of_the_earlier_one(
    serve: Callable, rank: Callable
) -> None:
    serve()
    old, new = rank(0), rank(0, attempt=1, token=8)
    assert isinstance(old.hears(Fenced), Fenced)
    assert met(new, rank(1, attempt=1)) == (1, 10)
    assert isinstance(rank(1, attempt=0).hears(Fenced), Fenced)


# ---- strangers, and peers that misbehave


def closes(connection: socket.socket) -> bool:
    connection.settimeout(SOON_S)
    with suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


GARBAGE = {
    'silent': b'',
    'partial length': b'\1\0',
    'partial frame': struct.pack('<I', 100) + b'x' * 50,
    'huge frame': struct.pack('<I', 2**31),
    'no message': struct.pack('<I', 4) + b'\xff' * 4,
    'flood': b'\0' * 2**20,
}


@pytest.mark.parametrize('sent', GARBAGE.values(), ids=GARBAGE)
def test_stranger_is_cut_off_and_ranks_do_not_notice(
    sent: bytes,
    serve: Callable,
    rank: Callable,
    listening: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, 'GREETING_S', 0.5)
    serve()
    with socket.create_connection(listening.getsockname()[:2]) as stranger:
        with suppress(OSError):
            stranger.sendall(sent)
        met(rank(0), rank(1))
        assert closes(stranger)


def test_stranger_costs_at_most_64_kib_and_is_cut_at_once(
    serve: Callable, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if all that it sent is there before the coordinator reads."""
    kept = []

    def feeds(self: Any, data: bytes) -> None:
        kept.append(len(self._buffer) + len(data))
        feed(self, data)

    feed = asyncio.StreamReader.feed_data
    monkeypatch.setattr(asyncio.StreamReader, 'feed_data', feeds)
    serving = serve()
    with socket.create_connection(listening.getsockname()[:2]) as stranger:
        wait_until(lambda: serving.coordinator._strangers)
        serving.loop.call_soon_threadsafe(time.sleep, 0.3)
        with suppress(OSError):
            stranger.sendall(struct.pack('<I', 2**20) + bytes(2**20 - 1))
        wait_until(lambda: not serving.coordinator._strangers, servers.GREETING_S / 2)
    assert 0 < max(kept) <= 64 * 2**10


@pytest.mark.parametrize(
    ('owner', 'limit'), [(servers, 'STRANGER_BYTES'), (statements, 'MAX_GREETING_BYTES')]
)
def test_a_limit_of_strangers_is_needed(
    owner: Any,
    limit: str,
    serve: Callable,
    listening: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, limit, 2**22)
    with pytest.raises(AssertionError):
        test_stranger_costs_at_most_64_kib_and_is_cut_at_once(serve, listening, monkeypatch)


def test_stranger_with_another_secret_is_refused(serve: Callable, listening: socket.socket) -> None:
    serve()
    connection = Connection(socket.create_connection(listening.getsockname()[:2]))
    connection.set_deadline(SOON_S)
    with pytest.raises(ConnectionError, match='does not know the secret'):
        introduce(connection, b'o' * 32)


def test_many_strangers_give_way_to_ranks(
    serve: Callable, rank: Callable, listening: socket.socket
) -> None:
    serving = serve()
    strangers = [
        socket.create_connection(listening.getsockname()[:2])
        for _ in range(servers.MOST_STRANGERS + 20)
    ]
    met(rank(0), rank(1))
    assert len(serving.coordinator._strangers) <= servers.MOST_STRANGERS
    assert closes(strangers[0])
    for one in strangers:
        one.close()


@pytest.mark.parametrize(
    'sent',
    [struct.pack('<I', 2**25), struct.pack('<I', 3) + b'xyz', framed(Beat())],
    ids=['huge', 'no message', 'no hello'],
)
def test_peer_that_breaks_the_protocol_is_cut_off(
    sent: bytes, serve: Callable, rank: Callable, listening: socket.socket
) -> None:
    serve()
    connection = connected(listening)
    connection.send_bytes(sent)
    with pytest.raises(ConnectionError):
        connection.receive(TO_RANK)
    met(rank(0), rank(1))


def test_message_in_pieces_is_understood(
    serve: Callable, rank: Callable, listening: socket.socket
) -> None:
    serve()
    connection = connected(listening)
    place = RoundPlace(RoundPhase.JOINED, 1, 0, b'x' * 300_000)
    sent = framed(Hello(1, 2, JobStart(0, 2, ''), 0, place))
    for at in range(0, len(sent), 50_000):
        connection.send_bytes(sent[at : at + 50_000])
        time.sleep(0.01)
    rank(0).client.join(b'')
    while not isinstance(found := connection.receive(TO_RANK), RoundMet):
        pass
    assert found.verdict == b'+' + b'x' * 300_000
    connection.close()


def test_peer_that_reads_nothing_is_cut_off(
    serve: Callable, rank: Callable, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, 'UNREAD_BYTES', 2**20)
    serve()
    connection = connected(listening)
    place = RoundPlace(RoundPhase.IN, 1, 3, been=True)
    connection.send(Hello(1, 2, JobStart(0, 2, ''), 0, place, facts={'big': b'x' * 2**20}))
    other = rank(0)
    with suppress(ConnectionError):
        for number in range(30):
            connection.send(clients.Ask(number, 'big', (1,)))
    with pytest.raises(ConnectionError):
        for _ in range(50):
            time.sleep(0.1)
            connection.send(clients.Ask(99, 'big', (1,)))
    met(other, rank(1))


def test_viewer_is_shown_the_board(
    serve: Callable, rank: Callable, listening: socket.socket
) -> None:
    serve()

    def shown() -> dict[str, object]:
        connection = connected(listening)
        connection.send(Show())
        found = connection.receive(TO_RANK)
        connection.close()
        assert isinstance(found, Shown)
        return found.board

    assert shown() == {}
    met(rank(0), rank(1))
    assert shown()['size'] == 2 and shown()['missing'] == []
    assert msgspec.json.encode(shown())


def test_nothing_on_the_threads_takes_long(serve: Callable, rank: Callable, caplog: Any) -> None:
    """asyncio warns in debug mode about callbacks of more than 100 ms, on a busy machine."""
    serving = serve()
    ranks = [rank(0), rank(1)]
    for loop in (serving.loop, *(one.client._loop for one in ranks)):
        loop.call_soon_threadsafe(loop.set_debug, True)
    about = met(*ranks)
    for start in range(20):
        for one in ranks:
            promise(one, about, WindowName(start, 'h_p'))
    assert ranks[0].hears(Settled)
    assert not [record for record in caplog.records if record.name == 'asyncio']


# ---- ranks that meet by themselves


def cut_off(one: Rank) -> None:
    """As a process that dies."""
    one.client._post(one.client._task.cancel)


def test_a_process_that_is_lost_ends_the_round_that_it_was_in(
    serve: Callable, rank: Callable, listening: socket.socket
) -> None:
    """Rank 2 has no way to the coordinator, and is not missed."""
    served, at = serve(leads=False), listening.getsockname()[:2]
    ranks = [rank(0, size=3), rank(1, size=3)]
    for one in ranks:
        one.client.enter((1, 7), at)
    wait_until(lambda: served.coordinator.board and not served.coordinator.board.learning)
    assert ranks[0].silent
    cut_off(ranks[1])
    assert ranks[0].hears(RoundOver) == RoundOver(1, 'rank 1 is lost')
    assert ranks[0].client._own.round == (1, 7), 'until it leaves by itself'
    ranks[0].client.leave(1, '')
    ranks[0].client.enter((2, 13), at)
    time.sleep(0.5)
    assert ranks[0].silent, 'the next process of rank 1 may not be connected yet'


def test_a_process_that_ends_as_planned_ends_no_round(
    serve: Callable, rank: Callable, listening: socket.socket
) -> None:
    serve(leads=False)
    ranks = [rank(0), rank(1)]
    for one in ranks:
        one.client.enter((1, 3), listening.getsockname()[:2])
        promise(one, (1, 3))
    assert ranks[0].hears(Settled)
    ranks[1].client.close()
    time.sleep(0.5)
    assert ranks[0].silent


def test_a_keeper_that_is_gone_ends_the_round(
    serve: Callable, rank: Callable, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the process of a rank. The next round may be kept by another one."""
    monkeypatch.setattr(clients, '_GONE_S', 0.2)
    served, at = serve(leads=False), listening.getsockname()[:2]
    one = rank(0, size=1)
    one.client.enter((1, 1), at)
    promise(one, (1, 1))
    assert one.hears(Settled)
    listening.close()
    served.stop()
    assert one.hears(RoundOver) == RoundOver(1, clients._GONE)
    one.client.leave(1, '')
    one.client.enter((2, 1), at)
    wait_until(lambda: one.client._own.round == (2, 1))
    while not one.silent:
        one.news.get()
    time.sleep(1.5)
    assert one.silent
