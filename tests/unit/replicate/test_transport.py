# SPDX-License-Identifier: Apache-2.0
import contextlib
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moevement_ext.memory.budget import HostMemoryError
from moevement_ext.memory.refused import CorruptWindow
from moevement_ext.memory.store import NodeStore, OwnerWindows
from moevement_ext.memory.window_file import WindowFile
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient, Replicator
from moevement_ext.replicate.server import ReplicaServer
from moevement_ext.replicate.transport import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Ack,
    Connection,
    FetchWindow,
    Hello,
    Proceed,
    ProtocolError,
    PutSlot,
    Refused,
    RemoteWindow,
    SlotHead,
    WindowHead,
)
from tests.unit.memory.samples import (
    PLAN,
    RUN,
    TOPOLOGY,
    WINDOW,
    capacity,
    digest,
    make_file,
    make_header,
    tmpfs_directory,
    write_slot,
    write_window,
)

REPOSITORY = Path(__file__).parents[3]
OWNER, HOLDER = 0, 1
DEADLINE_S = 20.0
"""How long a test waits for something that comes at once."""


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


@contextmanager
def serving(
    shm: Path, rank: int = HOLDER, port: int = 0, generations: int = 3
) -> Iterator[ReplicaServer]:
    """A holder of replicas of OWNER, on a node of its own."""
    store = NodeStore(shm, 'run1', f'node{rank}')
    server = ReplicaServer(
        store, rank, {OWNER: capacity()}, RUN, '127.0.0.1', port, generations, timeout_s=DEADLINE_S
    )
    try:
        yield server
    finally:
        server.stop()
        store.close()


@pytest.fixture
def server(shm: Path) -> Iterator[ReplicaServer]:
    with serving(shm) as server:
        yield server


@pytest.fixture
def client(server: ReplicaServer) -> Iterator[ReplicaClient]:
    client = ReplicaClient(server.address, RUN, timeout_s=DEADLINE_S)
    yield client
    client.close()


@pytest.fixture
def own(shm: Path) -> Iterator[OwnerWindows]:
    store = NodeStore(shm, 'run1', 'node0')
    yield OwnerWindows(store, OWNER, OWNER, capacity())
    store.close()


def commit(windows: OwnerWindows, start: int, plan: str = PLAN) -> WindowFile:
    file = windows.begin(start, plan)
    assert file is not None
    write_window(file, windows.owner)
    windows.commit(file)
    return file


def replica_starts(server: ReplicaServer) -> list[int]:
    return [ref.start for ref in server.replicas(OWNER).committed()]


# One client


def test_replica_is_byte_identical(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    client.put_window(OWNER, file)
    [replica] = server.replicas(OWNER).committed()
    assert digest(replica.path) == digest(file.path)
    assert client.list_windows() == [RemoteWindow(OWNER, 0, PLAN)]


def test_nothing_is_visible_before_the_commit(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    for slot in file.slots():
        client.put_slot(OWNER, file, slot)
        assert client.list_windows() == []
    client.commit(OWNER, 0, PLAN)
    assert client.list_windows() == [RemoteWindow(OWNER, 0, PLAN)]


def test_everything_may_be_repeated(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    client.put_slot(OWNER, file, 0)
    client.put_slot(OWNER, file, 0)
    client.put_window(OWNER, file)
    before = digest(server.replicas(OWNER).committed()[0].path)
    client.put_window(OWNER, file)
    assert digest(server.replicas(OWNER).committed()[0].path) == before
    assert replica_starts(server) == [0]


def test_incomplete_window_is_not_committed(own: OwnerWindows, client: ReplicaClient) -> None:
    file = commit(own, 0)
    client.put_slot(OWNER, file, 1)
    with pytest.raises(PeerRefused, match=r'has slots \[1\] of a window of 3'):
        client.commit(OWNER, 0, PLAN)
    with pytest.raises(PeerRefused, match='was not received'):
        client.commit(OWNER, 3, PLAN)
    assert client.list_windows() == []


def test_corrupt_payload_is_not_committed(own: OwnerWindows, client: ReplicaClient) -> None:
    file = commit(own, 0)
    file.payload(2)[0] ^= 1  # as if damaged on the way
    with pytest.raises(PeerRefused, match='CorruptWindow.*slot 2.*operator expert-0'):
        client.put_window(OWNER, file)
    assert client.list_windows() == []
    file.payload(2)[0] ^= 1
    client.put_window(OWNER, file)
    assert client.list_windows() == [RemoteWindow(OWNER, 0, PLAN)]


def test_window_of_another_owner_is_not_committed(shm: Path, client: ReplicaClient) -> None:
    file = make_file(shm / 'w', owner=7)
    with pytest.raises(PeerRefused, match='WrongWindow: .*owner is 7, expected 0'):
        client.put_window(OWNER, file)
    with pytest.raises(PeerRefused, match='no replicas of rank 7'):
        client.put_window(7, file)


def test_old_replica_stays_served_until_the_new_one_is_complete(
    own: OwnerWindows, shm: Path, server: ReplicaServer, client: ReplicaClient
) -> None:
    client.put_window(OWNER, commit(own, 0))
    [old] = server.replicas(OWNER).committed()
    before = digest(old.path)
    new = commit(own, 3)
    for slot in new.slots():
        client.put_slot(OWNER, new, slot)
        assert client.list_windows() == [RemoteWindow(OWNER, 0, PLAN)]
        assert digest(old.path) == before
    client.commit(OWNER, 3, PLAN)
    assert replica_starts(server) == [3, 0]


def test_replicas_are_recycled_only_when_outdated(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    for start in (0, 3, 6):
        client.put_window(OWNER, commit(own, start))
    own.persisted(3, PLAN)
    with pytest.raises(PeerRefused, match='no free file for window 9-plan1 of rank 0'):
        client.put_window(OWNER, commit(own, 9))
    client.persisted(OWNER, 3, PLAN)
    client.put_window(OWNER, own_file(own, 9))
    assert replica_starts(server) == [9, 6, 3]


def test_persisted_travels_with_slots(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    for start in (0, 3, 6, 9, 12):
        client.put_window(OWNER, commit(own, start), own.newest_persisted)
        own.persisted(start, PLAN)
    assert replica_starts(server) == [12, 9, 6]


def own_file(windows: OwnerWindows, start: int) -> WindowFile:
    file = windows.file(start, PLAN)
    assert file is not None
    return file


def test_unfinished_replica_gives_way_to_the_next_window(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    client.put_slot(OWNER, commit(own, 0), 0)
    client.put_window(OWNER, commit(own, 3))
    client.put_window(OWNER, commit(own, 6))
    assert replica_starts(server) == [6, 3]


def test_rollback_replaces_the_abandoned_past(
    shm: Path, own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    for start in (0, 3):
        client.put_window(OWNER, commit(own, start))
    other = make_file(shm / 'other', start=3)
    with other._lock:  # the same window, but not with the same bits
        other._draft = None
    altered = WindowFile.create(shm / 'altered', capacity())
    altered.begin(3, PLAN)
    for header in other.headers():
        altered.reserve_slot(header.slot, header.payload_bytes)[:] = 7
        altered.seal_slot(header)
    with pytest.raises(PeerRefused, match='has other content'):
        client.put_window(OWNER, altered)
    client.discard_after(OWNER, 0)
    assert replica_starts(server) == [0]
    client.put_window(OWNER, altered)
    assert replica_starts(server) == [3, 0]
    fetched = own.begin(6, PLAN)
    assert fetched is not None
    assert client.fetch_window(OWNER, 3, PLAN, fetched) == altered.headers()


def test_window_larger_than_the_replica_files(shm: Path, client: ReplicaClient) -> None:
    file = WindowFile.create(shm / 'w', 2 * capacity(20))
    file.begin(0, PLAN)
    write_window(file, window=20)
    with pytest.raises(PeerRefused, match='HostMemoryError'):
        client.put_window(OWNER, file)
    assert client.list_windows() == []


# Fetching


def test_restarted_owner_gets_its_window_back(
    shm: Path, own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    client.put_window(OWNER, file)
    before = digest(file.path)
    replacement = OwnerWindows(NodeStore(shm, 'run1', 'node9'), OWNER, OWNER, capacity())
    into = replacement.begin(0, PLAN)
    assert into is not None
    headers = client.fetch_window(OWNER, 0, PLAN, into)
    assert [header.slot for header in headers] == list(range(WINDOW))
    replacement.commit(into)
    assert digest(replacement.committed()[0].path) == before
    assert into.verify(RUN, TOPOLOGY)


def test_any_window_on_the_node_is_served(shm: Path, client: ReplicaClient) -> None:
    neighbour = NodeStore(shm, 'run1', f'node{HOLDER}')
    commit(OwnerWindows(neighbour, 6, 6, capacity()), 3)
    assert client.list_windows() == [RemoteWindow(6, 3, PLAN)]
    into = WindowFile.create(shm / 'into', capacity())
    into.begin(3, PLAN)
    assert len(client.fetch_window(6, 3, PLAN, into)) == WINDOW
    neighbour.close()


def test_damaged_copy_is_refused_and_another_copy_served(shm: Path, client: ReplicaClient) -> None:
    neighbour = NodeStore(shm, 'run1', f'node{HOLDER}')
    copies = [commit(OwnerWindows(neighbour, holder, 6, capacity()), 3) for holder in (6, 7)]
    into = WindowFile.create(shm / 'into', capacity())
    copies[0].payload(0)[0] ^= 1
    assert len(client.fetch_window(6, 3, PLAN, into)) == WINDOW
    copies[1].payload(1)[0] ^= 1
    with pytest.raises(PeerRefused, match='slot 0: checksum.*slot 1: checksum'):
        client.fetch_window(6, 3, PLAN, into)
    with pytest.raises(PeerRefused, match='not on this node'):
        client.fetch_window(6, 30, PLAN, into)
    neighbour.close()


def test_window_too_large_for_the_local_file(
    own: OwnerWindows, shm: Path, client: ReplicaClient
) -> None:
    client.put_window(OWNER, commit(own, 0))
    small = WindowFile.create(shm / 'small', capacity(1))
    with pytest.raises(HostMemoryError):
        client.fetch_window(OWNER, 0, PLAN, small)
    assert client.list_windows() == [RemoteWindow(OWNER, 0, PLAN)], 'the client is still of use'


def test_fetch_while_the_source_recycles(
    own: OwnerWindows, shm: Path, server: ReplicaServer, client: ReplicaClient
) -> None:
    """Readers take no lock: what arrives is whole, or it is refused, but never a mixture."""
    feeder = ReplicaClient(server.address, RUN, DEADLINE_S)
    feeder.put_window(OWNER, commit(own, 0))
    own.persisted(0, PLAN)
    done = threading.Event()

    def feed() -> None:
        for start in range(3, 300, 3):
            feeder.put_window(OWNER, commit(own, start), own.newest_persisted)
            own.persisted(start, PLAN)
        done.set()

    feeding = threading.Thread(target=feed)
    feeding.start()
    into = WindowFile.create(shm / 'into', capacity())
    whole = 0
    while not done.is_set():
        for window in client.list_windows():
            try:
                client.fetch_window(window.owner, window.start, window.plan, into)
            except (PeerRefused, CorruptWindow):
                continue
            into.verify(RUN, TOPOLOGY, OWNER, window.start, PLAN)
            whole += 1
    feeding.join()
    feeder.close()
    assert whole > 0


def test_damage_on_the_way_is_noticed_by_the_receiver(shm: Path) -> None:
    source = make_file(shm / 'w')
    listener = socket.create_server(('127.0.0.1', 0))

    def send_damaged() -> None:
        connection = Connection(listener.accept()[0])
        assert isinstance(connection.receive_request(), Hello)
        connection.send(Ack())
        assert isinstance(connection.receive_request(), FetchWindow)
        connection.send(WindowHead(WINDOW, source.capacity))
        for slot in source.slots():
            payload, frame = map(bytearray, source.slot_blob(slot))
            payload[0] ^= slot == 1
            connection.send(SlotHead(slot, len(payload), len(frame)))
            connection.send_bytes(bytes(payload + frame))
        connection.send(Ack())
        connection.close()

    sender = threading.Thread(target=send_damaged)
    sender.start()
    into = WindowFile.create(shm / 'into', capacity())
    client = ReplicaClient(listener.getsockname(), RUN, DEADLINE_S)
    with pytest.raises(CorruptWindow, match='into: slot 1: .*operator expert-0'):
        client.fetch_window(OWNER, 0, PLAN, into)
    sender.join()
    listener.close()
    client.close()


def test_sender_says_when_its_window_was_recycled_meanwhile(shm: Path) -> None:
    """The payload is larger than what the kernel buffers, so the sender waits for the receiver."""
    large = 64 * 2**20
    with serving(shm) as server:
        neighbour = NodeStore(shm, 'run1', f'node{HOLDER}')
        windows = OwnerWindows(neighbour, 6, 6, large + 2 * capacity())
        file = windows.begin(0, PLAN)
        assert file is not None
        header = msgspec.structs.replace(
            make_header(0, owner=6, window=1), payload_bytes=large, records=[]
        )
        file.reserve_slot(0, large)
        file.seal_slot(header)
        windows.commit(file)
        connection = connected(server)
        connection.send(FetchWindow(6, 0, PLAN))
        assert isinstance(connection.receive_reply(), WindowHead)
        windows.discard_after(-1)
        slot = connection.receive_reply()
        assert isinstance(slot, SlotHead)
        connection.receive_into(memoryview(bytearray(slot.payload_bytes + slot.frame_bytes)))
        reply = connection.receive_reply()
        assert isinstance(reply, Refused) and 'recycled while it was sent' in reply.reason
        connection.close()
        neighbour.close()


# Peers that are not well


def free_port() -> int:
    with socket.create_server(('127.0.0.1', 0)) as probe:
        return int(probe.getsockname()[1])


def test_unreachable_peer_is_named() -> None:
    port = free_port()
    client = ReplicaClient(('127.0.0.1', port), RUN, timeout_s=DEADLINE_S)
    with pytest.raises(PeerLost, match=f'127.0.0.1:{port}'):
        client.list_windows()


@contextmanager
def silent_peer(greets: bool) -> Iterator[tuple[str, int]]:
    """A peer that accepts connections and then hangs."""
    listener = socket.create_server(('127.0.0.1', 0))
    kept = []

    def accept() -> None:
        try:
            while True:
                connection = Connection(listener.accept()[0])
                kept.append(connection)
                if greets:
                    connection.receive_request()
                    connection.send(Ack())
        except OSError:
            return

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in kept:
            connection.close()


@pytest.mark.parametrize('greets', [False, True])
def test_every_wait_has_a_deadline(shm: Path, greets: bool) -> None:
    file = make_file(shm / 'w')
    into = WindowFile.create(shm / 'into', capacity())
    calls: list[Callable[[ReplicaClient], object]] = [
        lambda client: client.list_windows(),
        lambda client: client.put_slot(OWNER, file, 0),
        lambda client: client.fetch_window(OWNER, 0, PLAN, into),
        lambda client: client.commit(OWNER, 0, PLAN),
    ]
    with silent_peer(greets) as address:
        for call in calls:
            began = time.monotonic()
            with pytest.raises(PeerLost, match=str(address[1])):
                call(ReplicaClient(address, RUN, timeout_s=0.1))
            assert time.monotonic() - began < 5


_HOLDER_PROGRAM = """
import pathlib, sys
from moevement_ext.memory.store import NodeStore
from moevement_ext.replicate.server import ReplicaServer
from tests.unit.memory.samples import RUN, capacity
store = NodeStore(pathlib.Path(sys.argv[1]), 'run1', 'node1')
server = ReplicaServer(store, 1, {0: capacity()}, RUN, '127.0.0.1', int(sys.argv[2]))
print(server.address[1], flush=True)
sys.stdin.read()
"""


def start_holder(shm: Path, port: int = 0) -> 'tuple[subprocess.Popen[str], int]':
    process = subprocess.Popen(
        [sys.executable, '-c', _HOLDER_PROGRAM, str(shm), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_replicas_survive_the_death_of_the_holder(shm: Path, own: OwnerWindows) -> None:
    """The holder is killed; its successor serves what was committed and takes the rest again."""
    process, port = start_holder(shm)
    client = ReplicaClient(('127.0.0.1', port), RUN, timeout_s=DEADLINE_S)
    with process:
        client.put_window(OWNER, commit(own, 0))
        unfinished = commit(own, 3)
        client.put_slot(OWNER, unfinished, 0)
        process.kill()
    with pytest.raises(PeerLost):
        client.list_windows()
    process, _ = start_holder(shm, port)
    with process:
        assert client.list_windows() == [RemoteWindow(OWNER, 0, PLAN)]
        client.put_window(OWNER, unfinished)
        assert len(client.list_windows()) == 2
        process.kill()
    client.close()


def test_transfer_cut_off_is_taken_up_by_the_next_connection(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    """The first connection hangs in the middle of a payload; the second one gets the slot."""
    file = commit(own, 0)
    blob = file.slot_blob(0)
    hanging = connected(server)
    checksum = struct.unpack_from('<Q', blob.frame)[0]
    sizes = len(blob.payload), len(blob.frame)
    hanging.send(PutSlot(OWNER, 0, PLAN, 0, *sizes, checksum, None))
    assert isinstance(hanging.receive_reply(), Proceed)
    hanging.send_bytes(bytes(100))
    client.put_window(OWNER, file)
    assert digest(server.replicas(OWNER).committed()[0].path) == digest(file.path)
    with pytest.raises(OSError):
        hanging.receive_reply()
    hanging.close()


# Strangers


def connected(server: ReplicaServer, token: str = RUN) -> Connection:
    connection = Connection(socket.create_connection(server.address))
    connection.set_deadline(DEADLINE_S)
    connection.send(Hello(PROTOCOL_VERSION, token))
    reply = connection.receive_reply()
    if isinstance(reply, Refused):
        raise PermissionError(reply.reason)
    return connection


def test_other_run_is_refused(server: ReplicaServer) -> None:
    stranger = ReplicaClient(server.address, 'another run', DEADLINE_S)
    with pytest.raises(PeerRefused, match='--sparse-ckpt-run-id'):
        stranger.list_windows()


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
    listing = msgspec.msgpack.encode({'type': 'ListWindows'})
    assert closed_by_server(server, frame.pack(len(listing)) + listing), 'no Hello'
    assert closed_by_server(server, frame.pack(MAX_MESSAGE_BYTES + 1)), 'too large'
    assert closed_by_server(server, b'GET / HTTP/1.1\r\n\r\n')
    assert client.list_windows() == []


@settings(deadline=None, max_examples=50)
@given(messages=st.lists(st.binary(max_size=200), max_size=3))
def test_garbage_after_hello_never_stops_the_server(
    shared_server: ReplicaServer, messages: list[bytes]
) -> None:
    connection = connected(shared_server)
    with contextlib.suppress(OSError):  # the server may hang up at the first of them
        for message in messages:
            connection.send_bytes(struct.pack('<I', len(message)) + message)
    connection.close()
    client = ReplicaClient(shared_server.address, RUN, DEADLINE_S)
    assert client.list_windows() == []
    client.close()


@pytest.fixture(scope='module')
def shared_server() -> Iterator[ReplicaServer]:
    with tmpfs_directory() as shm, serving(shm) as server:
        yield server


@pytest.mark.parametrize('plan', ['../../evil', '', 'a-b'])
def test_plan_from_the_wire_is_no_path(server: ReplicaServer, shm: Path, plan: str) -> None:
    connection = connected(server)
    connection.send(PutSlot(OWNER, 0, plan, 0, 64, 64, 0, None))
    reply = connection.receive_reply()
    assert isinstance(reply, Refused) and 'plan digest' in reply.reason
    connection.close()


def test_oversized_claims_are_refused(server: ReplicaServer) -> None:
    connection = connected(server)
    connection.send(PutSlot(OWNER, 0, PLAN, 0, 2**63, 64, 0, None))
    reply = connection.receive_reply()
    assert isinstance(reply, Refused) and 'exceed the capacity' in reply.reason
    connection.send(PutSlot(OWNER, 0, PLAN, 1, 64, 2**40, 0, None))
    with pytest.raises(OSError):
        connection.receive_reply()
    connection.close()


def test_message_limit_holds_for_the_sender() -> None:
    left, right = _tcp_pair()
    with pytest.raises(ProtocolError, match='too large'):
        left.send(Refused('x' * MAX_MESSAGE_BYTES))
    left.close()
    right.close()


def _tcp_pair() -> tuple[Connection, Connection]:
    with socket.create_server(('127.0.0.1', 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return Connection(left), Connection(listener.accept()[0])


def test_stop_ends_open_connections(shm: Path) -> None:
    with serving(shm) as server:
        client = ReplicaClient(server.address, RUN, DEADLINE_S)
        client.list_windows()
        threads = threading.active_count()
    assert threading.active_count() <= threads - 2
    with pytest.raises(PeerLost):
        client.list_windows()


# Replicator


class Events:
    """Collects the callbacks of a replicator."""

    def __init__(self) -> None:
        self.replicated: queue.Queue[tuple[int, str]] = queue.Queue()
        self.degraded: queue.Queue[str] = queue.Queue()

    def next_replicated(self) -> tuple[int, str]:
        return self.replicated.get(timeout=DEADLINE_S)

    def next_degraded(self) -> str:
        return self.degraded.get(timeout=DEADLINE_S)


@contextmanager
def replicating(
    events: Events, *addresses: tuple[str, int], timeout_s: float = DEADLINE_S
) -> Iterator[Replicator]:
    clients = {
        rank: ReplicaClient(address, RUN, timeout_s) for rank, address in enumerate(addresses, 1)
    }
    replicator = Replicator(
        OWNER,
        clients,
        lambda start, plan: events.replicated.put((start, plan)),
        events.degraded.put,
    )
    try:
        yield replicator
    finally:
        replicator.stop()


def submit_all(replicator: Replicator, file: WindowFile) -> None:
    for slot in file.slots():
        replicator.submit(file, slot)


def test_slots_are_sent_as_they_are_sealed(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with (
        serving(shm, 1) as first,
        serving(shm, 2) as second,
        replicating(events, first.address, second.address) as replicator,
    ):
        for start in range(0, 15, 3):
            file = own.begin(start, PLAN)
            assert file is not None
            for slot in range(WINDOW):
                write_slot(file, slot)
                replicator.submit(file, slot)
            own.commit(file)
            assert events.next_replicated() == (start, PLAN)
            assert replica_starts(first)[0] == replica_starts(second)[0] == start
            own.announce(start, PLAN)
            own.persisted(start, PLAN)
            replicator.persisted(start, PLAN)
        assert events.degraded.empty()
        newest = own.committed()[0].path
        assert digest(first.replicas(OWNER).committed()[0].path) == digest(newest)


def test_lost_peer_is_reported_and_caught_up_when_it_is_back(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    port = free_port()
    with (
        serving(shm, 1) as alive,
        replicating(events, alive.address, ('127.0.0.1', port)) as replicator,
    ):
        submit_all(replicator, commit(own, 0))
        assert f'replica on rank 2: peer 127.0.0.1:{port} is lost' in events.next_degraded()
        assert events.replicated.empty()
        with serving(shm, 2, port) as back:
            assert events.next_replicated() == (0, PLAN)
            assert replica_starts(alive) == replica_starts(back) == [0]


def test_peer_that_lost_its_slots_gets_them_again(shm: Path, own: OwnerWindows) -> None:
    """A holder restarts in the middle of a window: what it had received is gone with it."""
    events = Events()
    file = own.begin(0, PLAN)
    assert file is not None
    port = free_port()
    with replicating(events, ('127.0.0.1', port)) as replicator:
        with serving(shm, 1, port) as before:
            write_slot(file, 0)
            replicator.submit(file, 0)
            [received] = wait_for(lambda: list(before.replicas(OWNER).path.glob('writing-*')))
            wait_for(lambda: WindowFile.open(received).slots())
        with serving(shm, 1, port) as after:
            for slot in (1, 2):
                write_slot(file, slot)
                replicator.submit(file, slot)
            assert events.next_replicated() == (0, PLAN)
            assert replica_starts(after) == [0]


def wait_for[Value](probe: Callable[[], Value]) -> Value:
    """Return the first true value of ``probe``."""
    give_up = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up:
        value = probe()
        if value:
            return value
        threading.Event().wait(0.005)
    raise TimeoutError('nothing came')


def test_submit_never_blocks_on_a_silent_peer(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with silent_peer(greets=True) as address, replicating(events, address, timeout_s=0.3) as sender:
        began = time.monotonic()
        for start in (0, 3, 6):
            submit_all(sender, commit(own, start))
        assert time.monotonic() - began < 0.3
        reports = {events.next_degraded() for _ in range(2)}
        assert any('window 0 was given up' in report for report in reports)
        assert any('is lost' in report for report in reports)


def test_recycled_source_is_not_sent_as_the_old_window(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    port = free_port()
    with replicating(events, ('127.0.0.1', port)) as replicator:
        file = commit(own, 0)
        submit_all(replicator, file)
        assert 'is lost' in events.next_degraded()
        own.announce(0, PLAN)
        own.persisted(3, PLAN)
        taken = [commit(own, start) for start in (3, 6, 9)]
        assert file in taken
        with serving(shm, 1, port) as server:
            wait_for(lambda: 'was recycled' in events.next_degraded())
            assert replica_starts(server) == []
            submit_all(replicator, own_file(own, 9))
            assert events.next_replicated() == (9, PLAN)


def test_new_peers_take_over(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with replicating(events, ('127.0.0.1', free_port())) as replicator:
        file = commit(own, 0)
        submit_all(replicator, file)
        assert 'is lost' in events.next_degraded()
        with serving(shm, 1) as server:
            replicator.set_peers({1: ReplicaClient(server.address, RUN, DEADLINE_S)})
            assert events.next_replicated() == (0, PLAN)


def test_rollback_reaches_the_peers_first(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with serving(shm, 1) as server, replicating(events, server.address) as replicator:
        for start in (0, 3):
            submit_all(replicator, commit(own, start))
            assert events.next_replicated() == (start, PLAN)
        replicator.discard_after(0)
        own.discard_after(0)
        submit_all(replicator, commit(own, 3, 'plan2'))
        assert events.next_replicated() == (3, 'plan2')
        assert [ref[:2] for ref in server.replicas(OWNER).committed()] == [(3, 'plan2'), (0, PLAN)]


def test_failing_callback_does_not_end_replication(shm: Path, own: OwnerWindows) -> None:
    done: queue.Queue[int] = queue.Queue()

    def fail_once(start: int, plan: str) -> None:
        done.put(start)
        if start == 0:
            raise RuntimeError('callback')

    with serving(shm, 1) as server:
        clients = {1: ReplicaClient(server.address, RUN, DEADLINE_S)}
        replicator = Replicator(OWNER, clients, fail_once, lambda reason: None)
        for start in (0, 3):
            submit_all(replicator, commit(own, start))
            assert done.get(timeout=DEADLINE_S) == start
        replicator.stop()
