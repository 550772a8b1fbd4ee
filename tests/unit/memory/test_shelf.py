# SPDX-License-Identifier: Apache-2.0
"""Memory of a node that runs in other layouts have left."""

from pathlib import Path

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Shelf


def test_holder_with_a_linked_lock_is_ignored(tmp_path: Path) -> None:
    other = NodeStore(tmp_path, 'run.a', 'node0')
    holder = other.holder_path(0)
    holder.mkdir(parents=True, mode=0o700)
    (holder / 'lock').symlink_to('/etc/passwd')
    assert list(Shelf(NodeStore(tmp_path, 'run.b', 'node0'), None).look('run.a')) == []
