# SPDX-License-Identifier: Apache-2.0
"""What lies in a node's memory of runs in other layouts."""

from pathlib import Path

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Shelf


def test_a_lock_that_is_a_link_belongs_to_no_job(tmp_path: Path) -> None:
    other = NodeStore(tmp_path, 'run.a', 'node0')
    holder = other.holder_path(0)
    holder.mkdir(parents=True, mode=0o700)
    (holder / 'lock').symlink_to('/etc/passwd')
    assert list(Shelf(NodeStore(tmp_path, 'run.b', 'node0'), None).look('run.a')) == []
