# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.memory.node_store import NodeStore
from tests.unit.memory.samples import tmpfs_directory


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in a tmpfs."""
    with tmpfs_directory() as path:
        yield path


@pytest.fixture
def store(shm: Path) -> Iterator[NodeStore]:
    store = NodeStore(shm, 'run1', 'node0')
    yield store
    store.close()
