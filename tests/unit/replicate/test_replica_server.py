# SPDX-License-Identifier: Apache-2.0
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.window.name import Agreed
from moevement_ext.replicate.client import PeerLost, ReplicaClient
from moevement_ext.replicate.protocol import MAX_MESSAGE_BYTES, FetchHeaders, PutSlot, Refused
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import SECRET, named, tmpfs_directory
from tests.unit.replicate.peers import DEADLINE_S, OWNER, ask, connected, serving

pytestmark = pytest.mark.timed


def closed_by_server(server: ReplicaServer, data: bytes) -> bool:
    """Send raw bytes to the server; say whether it hangs up without any answer."""
    with socket.create_connection(server.address, timeout=DEADLINE_S) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            return sock.recv(100) == b''
        except TimeoutError:
            return False
        except OSError:  # hung up before all was sent
            return True


def test_strangers_are_cut_off(server: ReplicaServer, client: ReplicaClient) -> None:
    frame = struct.Struct('<I')
    request = msgspec.msgpack.encode(FetchHeaders(OWNER, 0))
    assert closed_by_server(server, frame.pack(len(request)) + request), 'no Hello'
    assert closed_by_server(server, frame.pack(MAX_MESSAGE_BYTES + 1)), 'too large'
    assert closed_by_server(server, b'GET / HTTP/1.1\r\n\r\n')
    ask(client)


@given(messages=st.lists(st.binary(max_size=200), max_size=3))
def test_garbage_after_hello_never_stops_the_server(
    shared_server: ReplicaServer, messages: list[bytes]
) -> None:
    connection = connected(shared_server)
    with contextlib.suppress(OSError):  # the server may hang up at the first of them
        for message in messages:
            connection.send_bytes(struct.pack('<I', len(message)) + message)
    connection.close()
    client = ReplicaClient(shared_server.address, SECRET, DEADLINE_S)
    ask(client)
    client.close()


@pytest.fixture(scope='module')
def shared_server() -> Iterator[ReplicaServer]:
    with tmpfs_directory() as shm, serving(shm) as server:
        yield server


@pytest.mark.parametrize('plan', ['../../evil', '', 'a-b'])
def test_plan_from_the_wire_is_no_path(server: ReplicaServer, shm: Path, plan: str) -> None:
    connection = connected(server)
    connection.send(PutSlot(OWNER, named(0, plan), 0, 64, 64, 0, Agreed()))
    reply = connection.receive_reply()
    assert isinstance(reply, Refused) and 'plan digest' in reply.reason
    connection.close()


def test_oversized_claims_are_refused(server: ReplicaServer) -> None:
    connection = connected(server)
    connection.send(PutSlot(OWNER, named(0), 0, 2**63, 64, 0, Agreed()))
    reply = connection.receive_reply()
    assert isinstance(reply, Refused) and 'exceed the capacity' in reply.reason
    connection.send(PutSlot(OWNER, named(0), 1, 64, 2**40, 0, Agreed()))
    with pytest.raises(OSError):
        connection.receive_reply()
    connection.close()


def test_stop_ends_open_connections(shm: Path) -> None:
    with serving(shm) as server:
        client = ReplicaClient(server.address, SECRET, DEADLINE_S)
        ask(client)
        threads = threading.active_count()
    assert threading.active_count() <= threads - 2
    with pytest.raises(PeerLost):
        ask(client)
