# SPDX-License-Identifier: Apache-2.0
"""Real holders of replicas and real connections to them, shared by the tests of replication."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.memory.budget import NOTHING_LOGGED
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import Agreed, WindowName
from moevement_ext.rates import CpuCost
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.inbox import Inbox
from moevement_ext.replicate.node_plan import Member, Share
from moevement_ext.replicate.replica_server import ReplicaServer
from moevement_ext.replicate.secret import admit, introduce
from tests.unit.memory.samples import SECRET, capacity, identity_of, named

OWNER, HOLDER = 0, 1
CPU = torch.device('cpu')
DEADLINE_S = 20.0
"""How long a test waits for something that comes at once."""


def member_of(node: str, **others: Any) -> Member:
    """A rank without a log, unless `others` say otherwise."""
    return Member(
        **{
            'node': node,
            'capacity_bytes': capacity(),
            'logged': NOTHING_LOGGED,
            'host': 'host',
            'salt': SECRET,
            **others,
        }
    )


def host_memory_of(
    config: SparseCheckpointConfig,
    members: Sequence[Member],
    share: Share | None = None,
    device: torch.device = CPU,
    on_degraded: Callable[[str], None] = pytest.fail,
) -> HostMemory:
    """That of rank 0, unless `share` is another's, of a job of these ranks."""
    share = Share(identity_of(0), capacity()) if share is None else share
    encoded = [msgspec.msgpack.encode(member) for member in members]
    return HostMemory(config, 'run1', share, device, on_degraded, lambda own: encoded, SECRET)


def inbox_of_owner(
    store: NodeStore, rank: int = HOLDER, nbytes: int = capacity()
) -> dict[int, Inbox]:
    """For replicas of OWNER, in files of this size."""
    return {OWNER: Inbox(OwnerWindows(store, rank, OWNER, nbytes), CpuCost())}


@contextmanager
def serving(
    shm: Path,
    rank: int = HOLDER,
    port: int = 0,
    host: str = '127.0.0.1',
) -> Iterator[ReplicaServer]:
    """A holder of replicas of OWNER, on a node of its own."""
    store = NodeStore(shm, 'run1', f'node{rank}')
    inboxes = inbox_of_owner(store, rank)
    server = ReplicaServer(store, rank, inboxes, SECRET, host, port, DEADLINE_S)
    try:
        yield server
    finally:
        server.stop()
        store.close()


@contextmanager
def logging(path: Path) -> Iterator[UpstreamLog]:
    """A log large enough for all that a test sends."""

    def fail(reason: str) -> None:
        raise AssertionError(reason)

    log = UpstreamLog(path, 2**16, torch.device('cpu'), DEADLINE_S, fail)
    try:
        yield log
    finally:
        log.close()


def put_window(
    client: ReplicaClient, file: WindowFile, persisted: WindowName | None = None, owner: int = OWNER
) -> None:
    """Send a whole sealed window and commit it there."""
    put_slots(client, file, persisted, owner)
    assert client.commit(owner, file.required_name())


def put_slots(
    client: ReplicaClient, file: WindowFile, persisted: WindowName | None = None, owner: int = OWNER
) -> None:
    for slot in file.slots():
        client.put_slot(owner, file, slot, Agreed(persisted))


class SlowPeer(ReplicaClient):
    """Takes all slots; answers commits and discards, which it notes, once `answers` is set."""

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), SECRET)
        self.answers = threading.Event()
        self._asked: queue.Queue[WindowName | int] = queue.Queue()

    def next_asked(self) -> WindowName | int:
        """The next window to commit, or start to discard after."""
        return self._asked.get(timeout=DEADLINE_S)

    def put_slot(self, *_: object) -> int:
        return 1

    def commit(self, owner: int, window: WindowName) -> bool:
        self._answer(window)
        return True

    def discard_after(self, owner: int, start: int) -> None:
        self._answer(start)

    def _answer(self, asked: WindowName | int) -> None:
        self._asked.put(asked)
        if not self.answers.wait(DEADLINE_S):
            raise TimeoutError('the test never let it answer')


def ask(client: ReplicaClient) -> None:
    """Any exchange: it succeeds if the peer is there and speaks to this client."""
    assert client.fetch_headers(OWNER, 2**40) == []


def replicas(server: ReplicaServer) -> OwnerWindows:
    return server._inboxes[OWNER].windows


def replica_starts(server: ReplicaServer) -> list[int]:
    return [window.name.start for window in replicas(server).committed()]


def stored(shm: Path) -> list[tuple[int, WindowName]]:
    """Owners and names of the committed windows on the node of HOLDER."""
    return sorted((w.owner, w.name) for w in NodeStore(shm, 'run1', f'node{HOLDER}').scan())


def own_file(windows: OwnerWindows, start: int) -> WindowFile:
    file = windows.file(named(start))
    assert file is not None
    return file


@contextmanager
def silent_peer(greets: bool, secret: bytes = SECRET) -> Iterator[tuple[str, int]]:
    """A peer that accepts connections and then hangs."""
    listener = socket.create_server(('127.0.0.1', 0))
    kept = []

    def accept() -> None:
        try:
            while True:
                connection = Connection(listener.accept()[0])
                kept.append(connection)
                if greets:
                    admit(connection, secret)
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


def connected(server: ReplicaServer, secret: bytes = SECRET) -> Connection:
    connection = Connection(socket.create_connection(server.address))
    connection.set_deadline(DEADLINE_S)
    reason = introduce(connection, secret)
    if reason is not None:
        raise PermissionError(reason)
    return connection


def wait_for[Value](probe: Callable[[], Value]) -> Value:
    """Return the first true value of `probe`, also on a busy machine."""
    give_up = time.monotonic() + 6 * DEADLINE_S
    while time.monotonic() < give_up:
        value = probe()
        if value:
            return value
        threading.Event().wait(0.005)
    raise TimeoutError('nothing came')
