# SPDX-License-Identifier: Apache-2.0
"""Windows fetched from holders, some of which are lost meanwhile."""

import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import Agreed
from moevement_ext.memory.window.refusal import CorruptWindow
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient
from moevement_ext.replicate.protocol import (
    FetchWindow,
    Proceed,
    PutSlot,
    Refused,
    SlotHead,
    WindowHead,
)
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import (
    RUN,
    SECRET,
    TOPOLOGY,
    WINDOW,
    begun,
    capacity,
    commit,
    digest,
    make_file,
    make_header,
    named,
    write_slot,
)
from tests.unit.replicate.peers import (
    DEADLINE_S,
    HOLDER,
    OWNER,
    ask,
    connected,
    put_window,
    replicas,
    serving,
    silent_peer,
    stored,
)

pytestmark = pytest.mark.timed


def test_headers_of_a_window_that_was_cut_off_are_served(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    put_window(client, commit(own, 0))
    cut_off = begun(own, WINDOW)
    for slot in range(WINDOW - 1):
        write_slot(cut_off, slot, OWNER)
        client.put_slot(OWNER, cut_off, slot)
    found = client.fetch_headers(OWNER, 0)
    assert found == [cut_off.header(slot) for slot in range(WINDOW - 1)]
    assert [header.start for header in client.fetch_headers(OWNER, -1)] == (
        [0] * WINDOW + [WINDOW] * (WINDOW - 1)
    )
    with pytest.raises(PeerRefused, match='no replicas of rank'):
        client.fetch_headers(OWNER + 1, 0)


def test_damaged_copy_is_refused_and_another_copy_served(shm: Path, client: ReplicaClient) -> None:
    neighbour = NodeStore(shm, 'run1', f'node{HOLDER}')
    copies = [commit(OwnerWindows(neighbour, holder, 6, capacity()), 3) for holder in (6, 7)]
    into = WindowFile.create(shm / 'into', capacity())
    copies[0].payload(0)[0] ^= 1
    assert len(client.fetch_window(6, named(3), into)) == WINDOW
    copies[1].payload(1)[0] ^= 1
    with pytest.raises(PeerRefused, match='slot 0: checksum.*slot 1: checksum'):
        client.fetch_window(6, named(3), into)
    with pytest.raises(PeerRefused, match='not on this node'):
        client.fetch_window(6, named(30), into)
    neighbour.close()


def test_fetch_while_the_source_recycles_is_whole_or_refused(
    own: OwnerWindows, shm: Path, server: ReplicaServer, client: ReplicaClient
) -> None:
    """Readers take no lock: what arrives is whole, or it is refused, but never a mixture."""
    feeder = ReplicaClient(server.address, SECRET, DEADLINE_S)
    put_window(feeder, commit(own, 0))
    own.persisted(named(0))
    fed: Future[None] = Future()

    def feed() -> None:
        try:
            for start in range(3, 300, 3):
                put_window(feeder, commit(own, start), own.newest_persisted)
                own.persisted(named(start))
            fed.set_result(None)
        except BaseException as error:
            fed.set_exception(error)

    feeding = threading.Thread(target=feed)
    feeding.start()
    into = WindowFile.create(shm / 'into', capacity())
    whole = 0
    while not fed.done():
        for owner, name in stored(shm):
            try:
                client.fetch_window(owner, name, into)
            except (PeerRefused, CorruptWindow):
                continue
            into.verify(Expected(RUN, TOPOLOGY, OWNER, name))
            whole += 1
    feeding.join()
    fed.result()
    feeder.close()
    assert whole > 0


def test_sender_reports_a_window_recycled_during_the_transfer(shm: Path) -> None:
    large = 64 * 2**20
    with serving(shm) as server:
        neighbour = NodeStore(shm, 'run1', f'node{HOLDER}')
        windows = OwnerWindows(neighbour, 6, 6, large + 2 * capacity())
        file = begun(windows, 0)
        header = msgspec.structs.replace(
            make_header(0, owner=6, window=1), payload_bytes=large, records=[]
        )
        file.reserve_slot(0, large)
        file.seal_slot(header)
        windows.commit(file)
        connection = connected(server)
        connection.send(FetchWindow(6, named(0)))
        assert isinstance(connection.receive_reply(), WindowHead)
        windows.discard_after(-1)
        slot = connection.receive_reply()
        assert isinstance(slot, SlotHead)
        connection.receive_into(memoryview(bytearray(slot.payload_bytes + slot.frame_bytes)))
        reply = connection.receive_reply()
        assert isinstance(reply, Refused) and 'recycled while it was sent' in reply.reason
        connection.close()
        neighbour.close()


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
