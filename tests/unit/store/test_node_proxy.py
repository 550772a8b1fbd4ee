# SPDX-License-Identifier: Apache-2.0
"""A node's proxy acts as a store to the ranks of the node; all processes are real."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistError, DistStoreError, Store

from moevement_ext.store import nearest, wire
from moevement_ext.store.proxy import MOST_QUESTIONS
from moevement_ext.store.wire import Kind, Request
from tests.unit.store.processes import WAIT_S, Proxy, Server, until
from tests.unit.store.raw import Raw
from tests.unit.store.relay import Relay

pytestmark = pytest.mark.timed

RANKS = 8
KEYS = st.sampled_from(['a', 'b', 'c/d'])
NUMBERS = ['n', 'm']
VALUES = st.sampled_from(['', 'x', '7', 'y' * 5000])
QUESTIONS = st.one_of(
    st.tuples(st.just('set'), KEYS, VALUES),
    st.tuples(st.just('append'), KEYS, VALUES),
    st.tuples(st.just('compare_set'), KEYS, VALUES, VALUES),
    st.tuples(st.just('add'), st.sampled_from(NUMBERS), st.integers(-3, 3)),
    st.tuples(st.just('check'), st.lists(st.one_of(KEYS, st.sampled_from(NUMBERS)), min_size=1)),
    st.tuples(st.just('delete_key'), KEYS),
    st.tuples(st.just('multi_set'), st.just(['a', 'b']), st.lists(VALUES, min_size=2, max_size=2)),
)


def answers(store: Store, questions: list[tuple]) -> list[object]:
    """Replies of a store to all requests, and its content afterwards."""
    found: list[object] = []
    for what, *arguments in questions:
        if what == 'append':  # the key must exist
            store.compare_set(arguments[0], '', 'begun')
        found.append(getattr(store, what)(*arguments))
    store.set('one', 'at least')
    keys = sorted(store.list_keys())
    return [*found, keys, store.num_keys(), [store.get(key) for key in keys], store.multi_get(keys)]


@given(st.lists(QUESTIONS, max_size=12))
def test_proxy_replies_like_the_store(stores: tuple[Store, Store], asked: list) -> None:
    direct, led = stores
    assert answers(led, asked) == answers(direct, asked)
    for store in stores:
        for key in store.list_keys():
            store.delete_key(key)


@pytest.fixture(scope='module')
def stores() -> Iterator[tuple[Store, Store]]:
    """Two equal stores, one of them behind a proxy."""
    one, other = Server(), Server()
    proxy = Proxy(other.port)
    yield one.connect(), proxy.connect()
    for process in (proxy, one, other):
        process.close()


def together(stores: list[Store], what: Callable[[Store], object]) -> list:
    with ThreadPoolExecutor(len(stores)) as threads:
        return list(threads.map(what, stores))


def test_each_add_returns_a_unique_number(proxy: Proxy, server: Server) -> None:
    stores = [proxy.connect() for _ in range(RANKS)]
    told = together(stores, lambda store: [store.add('count', 1) for _ in range(200)])
    numbers = [number for one in told for number in one]
    assert sorted(numbers) == list(range(1, 200 * RANKS + 1))
    assert all(one == sorted(one) for one in told)
    assert server.connect().add('count', 0) == 200 * RANKS


def test_one_compare_set_wins(proxy: Proxy) -> None:
    stores = {str(rank): proxy.connect() for rank in range(RANKS)}
    for attempt in range(50):
        with ThreadPoolExecutor(RANKS) as threads:
            found = threads.map(
                lambda one, attempt=attempt: one[1].compare_set(f'first{attempt}', '', one[0]),
                stores.items(),
            )
        assert len(set(found)) == 1


def test_simultaneous_requests_are_combined(server: Server) -> None:
    """Except the first request, which is sent alone."""
    relay = Relay(server.port)
    with closing(Proxy(relay.port)) as proxy, ExitStack() as opened:
        ranks = [opened.enter_context(closing(Raw(proxy.port))) for _ in range(RANKS)]
        ranks[0].add(b'count')
        assert ranks[0].number() == 1
        before = relay.nbytes
        ranks[0].add(b'count')
        assert ranks[0].number() == 2
        bytes_of_one = relay.nbytes - before
        server.stand_still()
        for rank in ranks:
            rank.add(b'count')
        opened.enter_context(closing(Raw(proxy.port))).pass_by()
        server.go_on()
        assert sorted(rank.number() for rank in ranks) == list(range(3, RANKS + 3))
        assert relay.nbytes - before <= 3 * bytes_of_one


def test_all_waits_are_woken(proxy: Proxy, server: Server) -> None:
    stores = [proxy.connect() for _ in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        waits = [threads.submit(store.wait, ['barrier']) for store in stores]
        time.sleep(0.2)
        assert not any(one.done() for one in waits)
        assert proxy.connections_to(server.port) <= 2, 'one asks, one waits'
        server.connect().set('barrier', 'open')
        for one in waits:
            one.result(WAIT_S)
    assert [store.get('barrier') for store in stores] == [b'open'] * RANKS


def test_timed_out_client_continues_and_others_keep_waiting(proxy: Proxy) -> None:
    patient, impatient, other = (proxy.connect() for _ in range(3))
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(patient.wait, ['barrier'])
        for _ in range(3):
            with pytest.raises(DistStoreError):
                impatient.wait(['barrier'], timedelta(seconds=0.05))
        assert impatient.add('count', 1) == 1
        assert not wait.done()
        other.set('barrier', 'open')
        wait.result(WAIT_S)
    impatient.wait(['barrier'])


def test_wait_of_a_closed_connection_is_removed(proxy: Proxy, server: Server) -> None:
    staying = proxy.connect()
    sock = socket.create_connection(('127.0.0.1', proxy.port))
    sock.sendall(b'\x06' + (1).to_bytes(8, 'little') + (4).to_bytes(8, 'little') + b'/key')
    until(lambda: proxy.connections_to(server.port) == 2)
    sock.close()
    until(lambda: proxy.connections_to(server.port) == 1)
    assert staying.add('count', 1) == 1


def test_pipelined_requests_are_answered_in_order(proxy: Proxy, server: Server) -> None:
    """As proxies send them to a branch; here in pieces of 700 bytes."""
    questions = [Request(Kind.VALIDATE, number=wire.MAGIC)]
    for turn in range(50):
        questions += [
            Request(Kind.ADD, (b'/n',), number=1),  # the second waits for the first
            Request(Kind.SET, (b'/v%d' % turn,), (b'%d' % turn,)),
            Request(Kind.COMPARE_SET, (b'/v%d' % turn,), (b'', b'')),
            Request(Kind.PING, number=turn),
        ]
    expected = b''.join(
        wire.number(turn + 1) + wire.text(b'%d' % turn) + turn.to_bytes(4, 'little')
        for turn in range(50)
    )
    sent = b''.join(map(wire.encoded, questions))
    with socket.create_connection(('127.0.0.1', proxy.port), timeout=WAIT_S) as rank:
        rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), 700):
            rank.sendall(sent[at : at + 700])
        found = b''
        while len(found) < len(expected):
            found += rank.recv(len(expected))
    assert found == expected


def test_client_with_too_many_questions_is_disconnected(proxy: Proxy) -> None:
    """Else what it asks behind a wait that never ends would fill the memory of the proxy."""
    asked = [Request(Kind.VALIDATE, number=wire.MAGIC), Request(Kind.WAIT, (b'/never',))]
    asked += [Request(Kind.PING, number=turn) for turn in range(MOST_QUESTIONS)]
    with socket.create_connection(('127.0.0.1', proxy.port), WAIT_S) as sock:
        sock.sendall(b''.join(map(wire.encoded, asked[:-1])))
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):  # as many as it may have
            sock.recv(1)
        sock.settimeout(WAIT_S)
        sock.sendall(wire.encoded(asked[-1]))
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b''
    assert proxy.connect().add('count', 1) == 1


def test_invalid_client_is_disconnected(proxy: Proxy) -> None:
    with socket.create_connection(('127.0.0.1', proxy.port), WAIT_S) as sock:
        sock.sendall(b'GET / HTTP/1.1\r\n\r\n' + b'\xff' * 64)
        assert sock.recv(1) == b''
    assert proxy.connect().add('count', 1) == 1


def test_dead_store_is_lost_to_all_ranks_and_its_successor_is_found(
    proxy: Proxy, server: Server
) -> None:
    asking, waiting, idle = (proxy.connect() for _ in range(3))
    asking.add('count', 1)
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(waiting.wait, ['never'])
        time.sleep(0.2)
        server.close()
        with pytest.raises(DistError):
            wait.result(WAIT_S)
    for store in (asking, idle):
        with pytest.raises(DistError):
            store.add('count', 1)
    with pytest.raises(DistError):
        proxy.connect(0.5).num_keys()
    another = Server(server.port)
    try:
        assert proxy.connect().add('count', 1) == 1
        with pytest.raises(DistError):
            idle.add('count', 1)  # old connections do not use the new store
    finally:
        another.close()


def test_stopped_store_is_lost_to_all_ranks(server: Server) -> None:
    proxy = Proxy(server.port, 0.1, 1.0)
    idle, asking, waiting = (proxy.connect() for _ in range(3))
    with ThreadPoolExecutor(2) as threads:
        wait = threads.submit(waiting.wait, ['never'])
        server.stand_still()
        asked = threads.submit(asking.add, 'count', 1)
        for one in (wait, asked):
            with pytest.raises(DistError):
                one.result(WAIT_S)
    server.go_on()
    with pytest.raises(DistError):
        idle.num_keys()
    assert proxy.connect().num_keys() in (0, 1)
    proxy.close()


def test_ranks_use_the_proxy_of_their_store(
    proxy: Proxy, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def port(host: str) -> int:
        return nearest.connect(host, server.port, timedelta(seconds=WAIT_S)).port

    assert port('127.0.0.1') == server.port
    _set(monkeypatch, proxy)
    assert port('127.0.0.1') == proxy.port
    assert port('localhost') == server.port, 'another store, for all that is known'


def test_rank_without_a_proxy_connects_to_the_store(
    proxy: Proxy,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _set(monkeypatch, proxy)
    monkeypatch.setattr(nearest, '_TO_CONNECT_S', 0.5)
    proxy.close()
    store = nearest.connect('127.0.0.1', server.port, timedelta(seconds=WAIT_S))
    assert store.port == server.port
    assert 'no proxy of this node' in caplog.text


def _set(monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> None:
    for name, value in proxy.variables.items():
        monkeypatch.setenv(name, value)
