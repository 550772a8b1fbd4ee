# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import SECRET, capacity
from tests.unit.replicate.peers import DEADLINE_S, OWNER, serving


@pytest.fixture
def server(shm: Path) -> Iterator[ReplicaServer]:
    with serving(shm) as server:
        yield server


@pytest.fixture
def client(server: ReplicaServer) -> Iterator[ReplicaClient]:
    client = ReplicaClient(server.address, SECRET, timeout_s=DEADLINE_S)
    yield client
    client.close()


@pytest.fixture
def own(shm: Path) -> Iterator[OwnerWindows]:
    store = NodeStore(shm, 'run1', 'node0')
    yield OwnerWindows(store, OWNER, OWNER, capacity(), generations=4)
    store.close()
