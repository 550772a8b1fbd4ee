# SPDX-License-Identifier: Apache-2.0
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import Agreed
from moevement_ext.replicate.client import PeerLost, ReplicaClient
from moevement_ext.replicate.protocol import Proceed, PutSlot
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.distributed.harness.ports import free_port
from tests.support.forks import Forked
from tests.unit.memory.samples import SECRET, capacity, commit, digest, make_file, named
from tests.unit.replicate.peers import (
    DEADLINE_S,
    OWNER,
    ask,
    connected,
    inbox_of_owner,
    put_window,
    replicas,
    silent_peer,
    stored,
)

pytestmark = pytest.mark.timed


def _hold(shm: Path, port: int) -> None:
    """Body of a process: serve until it is killed."""
    store = NodeStore(shm, 'run1', 'node1')
    server = ReplicaServer(store, 1, inbox_of_owner(store), SECRET, port=port)
    print(server.address[1], flush=True)
    signal.pause()


def test_unreachable_peer_is_named() -> None:
    port = free_port()
    client = ReplicaClient(('127.0.0.1', port), SECRET, timeout_s=DEADLINE_S)
    with pytest.raises(PeerLost, match=f'127.0.0.1:{port}'):
        ask(client)


@pytest.mark.parametrize('greets', [False, True])
def test_every_wait_has_a_deadline(shm: Path, greets: bool) -> None:
    file = make_file(shm / 'w')
    into = WindowFile.create(shm / 'into', capacity())
    calls: list[Callable[[ReplicaClient], object]] = [
        ask,
        lambda client: client.put_slot(OWNER, file, 0),
        lambda client: client.fetch_window(OWNER, named(0), into),
        lambda client: client.commit(OWNER, named(0)),
    ]
    with silent_peer(greets) as address:
        for call in calls:
            began = time.monotonic()
            with pytest.raises(PeerLost, match=str(address[1])):
                call(ReplicaClient(address, SECRET, timeout_s=0.1))
            assert time.monotonic() - began < DEADLINE_S


def start_holder(shm: Path, port: int = 0) -> tuple[Forked, int]:
    process = Forked(_hold, shm, port)
    return process, int(process.stdout.readline())


def test_replicas_survive_the_death_of_the_holder(shm: Path, own: OwnerWindows) -> None:
    holder, port = start_holder(shm)
    client = ReplicaClient(('127.0.0.1', port), SECRET, timeout_s=DEADLINE_S)
    put_window(client, commit(own, 0))
    unfinished = commit(own, 3)
    client.put_slot(OWNER, unfinished, 0)
    holder.kill()
    with pytest.raises(PeerLost):
        ask(client)
    holder, _ = start_holder(shm, port)
    assert stored(shm) == [(OWNER, named(0))]
    put_window(client, unfinished)
    assert stored(shm) == [(OWNER, named(0)), (OWNER, named(3))]
    holder.kill()
    client.close()


def test_transfer_cut_off_is_taken_up_by_the_next_connection(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    blob = file.slot_blob(0)
    hanging = connected(server)
    checksum = struct.unpack_from('<Q', blob.frame)[0]
    sizes = len(blob.payload), len(blob.frame)
    hanging.send(PutSlot(OWNER, named(0), 0, *sizes, checksum, Agreed()))
    assert isinstance(hanging.receive_reply(), Proceed)
    hanging.send_bytes(bytes(100))
    put_window(client, file)
    assert digest(replicas(server).committed()[0].path) == digest(file.path)
    with pytest.raises(OSError):
        hanging.receive_reply()
    hanging.close()
