# SPDX-License-Identifier: Apache-2.0
import threading
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.refusal import CorruptWindow
from moevement_ext.replicate.client import PeerRefused, ReplicaClient
from moevement_ext.replicate.protocol import (
    FetchWindow,
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
    serving,
    stored,
)

pytestmark = pytest.mark.timed


def test_restarted_owner_fetches_its_window(
    shm: Path, own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    put_window(client, file)
    before = digest(file.path)
    replacement = OwnerWindows(NodeStore(shm, 'run1', 'node9'), OWNER, OWNER, capacity())
    into = begun(replacement, 0)
    headers = client.fetch_window(OWNER, named(0), into)
    assert [header.slot for header in headers] == list(range(WINDOW))
    replacement.commit(into)
    assert digest(replacement.committed()[0].path) == before
    assert into.verify(Expected(RUN, TOPOLOGY))


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


def test_window_too_large_for_the_local_file_is_refused(
    own: OwnerWindows, shm: Path, client: ReplicaClient
) -> None:
    put_window(client, commit(own, 0))
    small = WindowFile.create(shm / 'small', capacity(1))
    with pytest.raises(HostMemoryError):
        client.fetch_window(OWNER, named(0), small)
    assert stored(shm) == [(OWNER, named(0))]
    ask(client)


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
