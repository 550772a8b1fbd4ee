# SPDX-License-Identifier: Apache-2.0
"""Any client takes a bounded part of a proxy, which runs in the process that starts workers."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest

from moevement_ext.store import wire
from moevement_ext.store.proxy import MOST_BYTES_OWED, MOST_STRANGERS
from moevement_ext.store.wire import Kind, Request
from tests.unit.store.processes import WAIT_S, Proxy, Server, until

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
MIB = 1 << 20
GREETING = wire.encoded(Request(Kind.VALIDATE, number=wire.MAGIC))


@pytest.fixture
def proxy(proxy: Proxy) -> Iterator[Proxy]:
    yield proxy
    assert proxy.connect().add('goes on', 1) == 1, 'ranks are served all the same'


@pytest.fixture
def stranger(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(('127.0.0.1', proxy.port), WAIT_S) as sock:
        sock.sendall(GREETING)
        yield sock


def sent_until_cut(sock: socket.socket, what: bytes, times: int) -> int:
    """Number of messages sent before the connection was closed."""
    for number in range(times):
        try:
            sock.sendall(what)
        except OSError:
            return number
    return times


def is_cut(sock: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return sock.recv(1) == b''
    return True


def test_endless_request_is_cut_off(proxy: Proxy, stranger: socket.socket) -> None:
    """It would be buffered until complete, and cost more time with each packet."""
    resident = psutil.Process(proxy.pid).memory_info().rss
    stranger.sendall(bytes([Kind.MULTI_SET]) + wire.number(1 << 16))
    part = wire.text(b'/k') + wire.text(bytes(MIB))
    assert sent_until_cut(stranger, part, 256) < 64
    assert psutil.Process(proxy.pid).memory_info().rss - resident < 128 * MIB


def test_request_with_too_many_keys_is_cut_off(stranger: socket.socket) -> None:
    stranger.sendall(bytes([Kind.MULTI_GET]) + wire.number(1 << 20))
    assert is_cut(stranger)


def test_silent_clients_are_disconnected(proxy: Proxy) -> None:
    rank = proxy.connect()
    before = psutil.Process(proxy.pid).num_fds()
    with ExitStack() as strangers:
        made = [
            strangers.enter_context(socket.create_connection(('127.0.0.1', proxy.port), WAIT_S))
            for _ in range(4 * MOST_STRANGERS)
        ]
        assert is_cut(made[0]), 'the oldest'
        assert proxy.connect().add('others', 1) == 1
        until(lambda: psutil.Process(proxy.pid).num_fds() < before + 2 * MOST_STRANGERS)
        assert is_cut(made[-1]), 'none is listened to for long'
    assert rank.add('others', 1) == 2


def test_unread_replies_are_bounded(proxy: Proxy, stranger: socket.socket) -> None:
    proxy.connect().set('large', 'x' * 4 * MIB)
    resident = psutil.Process(proxy.pid).memory_info().rss
    many = 4 * MOST_BYTES_OWED // (4 * MIB)
    sent_until_cut(stranger, wire.encoded(Request(Kind.GET, (b'/large',))), many)
    until(lambda: proxy.connections_from_clients() == 1)
    assert psutil.Process(proxy.pid).memory_info().rss - resident < 3 * MOST_BYTES_OWED


def test_waits_for_many_keys_are_bounded(
    proxy: Proxy, server: Server, stranger: socket.socket
) -> None:
    waits = [wire.encoded(Request(Kind.WAIT, (b'/never/%d' % number,))) for number in range(8192)]
    with suppress(OSError):
        stranger.sendall(b''.join(waits))
    assert is_cut(stranger)
    until(lambda: proxy.connections_to(server.port) == 1)


def test_data_for_a_stopped_store_is_bounded(
    proxy: Proxy, server: Server, stranger: socket.socket
) -> None:
    proxy.connect().set('is', 'reached')
    server.stand_still()
    told = wire.encoded(Request(Kind.SET, (b'/key',), (bytes(MIB),)))
    assert sent_until_cut(stranger, told, 512) < 256
    server.go_on()
