# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.memory.node_store import NodeStore


@pytest.fixture
def store(shm: Path) -> Iterator[NodeStore]:
    store = NodeStore(shm, 'run1', 'node0')
    yield store
    store.close()
