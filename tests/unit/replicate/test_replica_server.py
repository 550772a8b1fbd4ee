# SPDX-License-Identifier: Apache-2.0
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moevement_ext.memory.budget import LEDGER_RECORDS
from moevement_ext.memory.ledger import MAX_SCALARS, Ledger, LedgerEntry
from moevement_ext.memory.window.name import Agreed
from moevement_ext.replicate.client import PeerLost, ReplicaClient
from moevement_ext.replicate.protocol import (
    MAX_MESSAGE_BYTES,
    FetchHeaders,
    LedgerEntries,
    PutSlot,
    Refused,
)
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import SECRET, identity_of, named
from tests.unit.replicate.peers import DEADLINE_S, OWNER, ask, connected, serving
from tests.unit.replicate.test_answers import Answers
from tests.unit.replicate.test_answers import answering as answering

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


LARGEST = 2**63
"""Iteration numbers, for which entries are as long as they get."""


@pytest.fixture
def ledger(server: ReplicaServer, shm: Path) -> Iterator[Ledger]:
    ledger = server._ledger = Ledger(shm / 'ledger', LEDGER_RECORDS, identity_of(1))
    yield ledger
    ledger.close()


def entry(iteration: int, **own: object) -> LedgerEntry:
    norms = [0.1 + place for place in range(MAX_SCALARS)]
    known = LedgerEntry(iteration, norms, [True] * MAX_SCALARS, LARGEST, LARGEST, LARGEST)
    return msgspec.structs.replace(known, consumed_valid=LARGEST, **own)


def test_a_whole_ledger_is_one_bounded_reply(ledger: Ledger, client: ReplicaClient) -> None:
    first = LARGEST - LEDGER_RECORDS
    for iteration in range(first, LARGEST):
        ledger.append(entry(iteration, loss=0.5))
    expected = [entry(iteration) for iteration in range(first, LARGEST)]
    assert client.fetch_ledger(first - 1, LARGEST - 1) == expected
    assert client.fetch_ledger(0, LARGEST - 1) == expected
    assert client.fetch_ledger(first, first + 1) == expected[1:2]
    assert client.fetch_ledger(0, 9) == []


@pytest.mark.parametrize('iteration', [-1, 3, 10])
def test_entries_of_other_iterations_are_refused(iteration: int, answering: Answers) -> None:
    client = ReplicaClient(answering(LedgerEntries([entry(iteration)])), SECRET, DEADLINE_S)
    with pytest.raises(PeerLost, match='entries of other iterations'):
        client.fetch_ledger(3, 9)
