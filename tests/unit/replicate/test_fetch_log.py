# SPDX-License-Identifier: Apache-2.0
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import CorruptLog, Direction, LoggedTensor, LogKey
from moevement_ext.replicate import greeting
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.protocol import FetchLog, LogHead
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import SECRET
from tests.unit.replicate.peers import DEADLINE_S, connected, logging, silent_peer

pytestmark = pytest.mark.timed

DOWN, UP = Direction.DOWN, Direction.UP


@pytest.fixture
def log(shm: Path, server: ReplicaServer) -> Iterator[UpstreamLog]:
    with logging(shm / 'log') as log:
        server.serve_log(log)
        yield log


def test_a_record_arrives_as_it_was_logged(client: ReplicaClient, log: UpstreamLog) -> None:
    sent = torch.randn(3, 5).bfloat16()
    log.append(4, DOWN, torch.zeros(2))
    log.append(4, UP, torch.zeros(2))
    log.append(4, DOWN, sent)
    found = client.fetch_log(LogKey(4, DOWN, 1))
    assert found is not None
    tensor, data = found
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ('bfloat16', (3, 5), 30)
    assert torch.equal(torch.frombuffer(data, dtype=torch.bfloat16).view(3, 5), sent)


def test_empty_tensors_travel_too(client: ReplicaClient, log: UpstreamLog) -> None:
    log.append(1, UP, torch.empty(0, 7))
    log.append(1, UP, torch.ones(1))
    found = client.fetch_log(LogKey(1, UP, 0))
    assert found is not None and found[0].shape == (0, 7) and not found[1]
    assert client.fetch_log(LogKey(1, UP, 1)) is not None, 'the connection is still in step'


def test_pending_record_is_answered_by_not_yet(client: ReplicaClient, log: UpstreamLog) -> None:
    assert client.fetch_log(LogKey(1, DOWN, 0)) is None
    log.append(1, DOWN, torch.ones(1))
    assert client.fetch_log(LogKey(1, DOWN, 0)) is not None


def test_dropped_record_is_refused(client: ReplicaClient, log: UpstreamLog) -> None:
    log.append(1, DOWN, torch.ones(1))
    log.append(2, DOWN, torch.ones(1))
    log.drop_until(1)
    with pytest.raises(PeerRefused, match='LogGap: .*iteration 1 is gone'):
        client.fetch_log(LogKey(1, DOWN, 0))
    assert client.fetch_log(LogKey(2, DOWN, 0)) is not None, 'a refusal ends nothing'


def test_without_a_log_requests_are_refused(
    server: ReplicaServer, client: ReplicaClient, log: UpstreamLog
) -> None:
    log.append(1, DOWN, torch.ones(1))
    server.serve_log(None)
    with pytest.raises(PeerRefused, match='no upstream log'):
        client.fetch_log(LogKey(1, DOWN, 0))
    server.serve_log(log)
    assert client.fetch_log(LogKey(1, DOWN, 0)) is not None


def test_unknown_direction_is_no_request(server: ReplicaServer) -> None:
    connection = connected(server)
    wrong = msgspec.msgpack.encode({'type': 'FetchLog', 'key': [1, 'sideways', 0]})
    connection.send_bytes(len(wrong).to_bytes(4, 'little') + wrong)
    with pytest.raises(OSError):
        connection.receive_reply()
    connection.close()


def test_damage_on_the_way_is_noticed() -> None:
    listener = socket.create_server(('127.0.0.1', 0))

    def send_damaged() -> None:
        connection = Connection(listener.accept()[0])
        connection.set_deadline(DEADLINE_S)
        greeting.admit(connection, SECRET)
        assert connection.receive_request() == FetchLog(LogKey(1, DOWN, 0))
        connection.send(LogHead(LoggedTensor('uint8', (4,), 4, 12345)))
        connection.send_bytes(b'abcd')
        connection.close()

    sender = threading.Thread(target=send_damaged)
    sender.start()
    client = ReplicaClient(listener.getsockname(), SECRET, DEADLINE_S)
    with pytest.raises(CorruptLog, match=r'tensor 0 sent down in iteration 1, from peer 127\.'):
        client.fetch_log(LogKey(1, DOWN, 0))
    sender.join()
    listener.close()
    client.close()


def test_interrupt_ends_an_exchange() -> None:
    """The peer greets and then says nothing, so only the interrupt can end the exchange."""
    with silent_peer(greets=True) as address:
        client = ReplicaClient(address, SECRET, timeout_s=1000)
        client.interrupt()  # nothing to interrupt yet
        errors: list[Exception] = []

        def fetch() -> None:
            try:
                client.fetch_log(LogKey(1, DOWN, 0))
            except PeerLost as error:
                errors.append(error)

        fetching = threading.Thread(target=fetch, daemon=True)
        fetching.start()
        while fetching.is_alive():  # the connection may only just be being opened
            client.interrupt()
            fetching.join(0.01)
        assert len(errors) == 1
        client.close()
