# SPDX-License-Identifier: Apache-2.0
"""Only members of the job may talk to a replica holder, and strangers cost it little."""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from moevement_ext.replicate import replica_server as server_module
from moevement_ext.replicate.client import PeerLost, ReplicaClient
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.protocol import PROTOCOL_VERSION, Ack, FetchHeaders, Refused
from moevement_ext.replicate.replica_server import ReplicaServer
from moevement_ext.replicate.secret import _Challenge, _Hello, _Response, admit
from tests.unit.memory.samples import SECRET
from tests.unit.replicate.peers import DEADLINE_S, OWNER, ask, connected, serving, wait_for

pytestmark = pytest.mark.timed

ANOTHER_SECRET = bytes(32)
_CHALLENGE = msgspec.msgpack.Decoder(_Challenge)
_ANSWER = msgspec.msgpack.Decoder(Refused)


def opened(server: ReplicaServer) -> Connection:
    connection = Connection(socket.create_connection(server.address))
    connection.set_deadline(DEADLINE_S)
    return connection


def test_a_client_of_another_job_sees_that_this_is_not_its_server(server: ReplicaServer) -> None:
    stranger = ReplicaClient(server.address, ANOTHER_SECRET, DEADLINE_S)
    with pytest.raises(PeerLost, match='does not know the secret.*--sparse-ckpt-run-id'):
        ask(stranger)


def test_a_client_that_cannot_prove_itself_is_refused(server: ReplicaServer) -> None:
    connection = opened(server)
    connection.send(_Hello(PROTOCOL_VERSION, secrets.token_bytes(32)))
    challenge = connection.receive(_CHALLENGE)
    connection.send(_Response(challenge.proof))  # what the server has proved itself with
    assert connection.receive(_ANSWER).reason == 'this holder belongs to another job'
    connection.send(FetchHeaders(OWNER, 0))
    with pytest.raises(OSError):
        connection.receive_reply()


def test_a_recorded_greeting_is_of_no_use(server: ReplicaServer) -> None:
    nonce = secrets.token_bytes(32)
    first = opened(server)
    first.send(_Hello(PROTOCOL_VERSION, nonce))
    challenge = first.receive(_CHALLENGE)
    recorded = hmac.digest(SECRET, b'client' + nonce + challenge.nonce, 'sha256')
    first.send(_Response(recorded))
    assert isinstance(first.receive_reply(), Ack), 'it was a good one'
    second = opened(server)
    second.send(_Hello(PROTOCOL_VERSION, nonce))
    second.receive(_CHALLENGE)
    second.send(_Response(recorded))
    assert second.receive(_ANSWER).reason == 'this holder belongs to another job'


def test_other_protocol_version_is_refused_by_name(server: ReplicaServer) -> None:
    connection = opened(server)
    connection.send(_Hello(PROTOCOL_VERSION + 1, bytes(32)))
    assert connection.receive(_ANSWER).reason == (
        f'protocol version {PROTOCOL_VERSION + 1}, this holder speaks {PROTOCOL_VERSION}'
    )


@contextlib.contextmanager
def stranger_serving(answer: Callable[[Connection], None]) -> Iterator[tuple[str, int]]:
    """A server that is not of the job."""
    listener = socket.create_server(('127.0.0.1', 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection = Connection(listener.accept()[0])
            connection.set_deadline(DEADLINE_S)
            answer(connection)
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()
    listener.close()
    thread.join()


def test_no_client_gives_a_stranger_anything_to_hold() -> None:
    heard: list[object] = []

    def answer(connection: Connection) -> None:
        hello = connection.receive(msgspec.msgpack.Decoder(_Hello))
        heard.append(hello)
        connection.send(_Challenge(bytes(32), hmac.digest(hello.nonce, b'', 'sha256')))
        heard.append(connection.receive_request())

    with stranger_serving(answer) as address:
        client = ReplicaClient(address, SECRET, DEADLINE_S)
        with pytest.raises(PeerLost, match='does not know the secret'):
            ask(client)
    assert len(heard) == 1, 'the client hung up without another word'


@pytest.mark.parametrize('length', [257, 2**22, 2**32 - 1])
def test_nothing_long_is_received_before_the_greeting(length: int) -> None:
    with socket.create_server(('127.0.0.1', 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        connection = Connection(listener.accept()[0])
        sender.sendall(struct.pack('<I', length))
        connection.set_deadline(DEADLINE_S)
        with pytest.raises(ConnectionError, match=f'message of {length} bytes exceeds 256'):
            admit(connection, SECRET)
        sender.close()
        connection.close()


# Strangers in numbers


def memory_mib() -> int:
    return int(psutil.Process().memory_info().rss) // 2**20


def test_strangers_take_few_threads_and_no_memory(
    server: ReplicaServer, client: ReplicaClient
) -> None:
    ask(client)
    threads, memory = threading.active_count(), memory_mib()
    crowd = []
    for _ in range(200):
        sock = socket.create_connection(server.address)
        with contextlib.suppress(OSError):
            sock.sendall(struct.pack('<I', 4 * 2**20) + b'x' * 10)
        crowd.append(sock)
    idle = [socket.create_connection(server.address) for _ in range(200)]
    assert threading.active_count() - threads <= 64
    assert memory_mib() - memory < 64
    other = ReplicaClient(server.address, SECRET, DEADLINE_S)
    ask(other)
    ask(client)
    other.close()
    for sock in crowd + idle:
        sock.close()


def test_a_silent_stranger_is_dropped_soon(
    server: ReplicaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, '_GREETING_S', 0.2)
    with socket.create_connection(server.address) as sock:
        sock.settimeout(server_module._GREETING_S + DEADLINE_S)
        assert sock.recv(1) == b''


def test_connections_in_all_are_limited(
    server: ReplicaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, '_MAX_CONNECTIONS', 4)
    peers = [connected(server) for _ in range(4)]
    with pytest.raises(OSError):
        connected(server)
    peers[0].close()
    wait_for(lambda: len(server._connections) < 4)
    peers.append(connected(server))
    for peer in peers:
        peer.close()


def test_only_the_announced_address_is_listened_on(server: ReplicaServer) -> None:
    assert server.address[0] == '127.0.0.1'
    with pytest.raises(OSError):
        socket.create_connection(('127.0.0.2', server.address[1]), timeout=DEADLINE_S)


def has_ipv6() -> bool:
    try:
        socket.create_server(('::1', 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason='no IPv6 here')
def test_the_family_that_is_announced_is_listened_in(shm: Path) -> None:
    with serving(shm, host='::1') as server:
        assert server.address[0] == '::1'
        client = ReplicaClient(server.address, SECRET, DEADLINE_S)
        ask(client)
        client.close()
