# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from pathlib import Path

import pytest

from moevement_ext.launch.child import FdLoop
from moevement_ext.launch.hosts import SlurmStarter
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.memory import reservation
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import ReservedPages
from tests.unit.memory.samples import tmpfs_directory
from tools.bench import spare_node


@pytest.mark.parametrize('reserves', [True, False])
def test_reserved_memory_is_counted_at_the_loss(
    reserves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[bytes]] = []
    monkeypatch.setattr(SlurmStarter, 'reserve', lambda *args: asked.append(args[2]))
    monkeypatch.setattr(SlurmStarter, 'lose_node', lambda *args: None)
    config = LaunchConfig(__file__, nodes=2)
    starter = spare_node._Starter(reserves, config, FdLoop(), lambda event: None)
    kept = [reservation._KeptFile('0', size, size) for size in (1, 2, 2)]
    files = [reservation.encode(kept[:2]), reservation.encode(kept[1:])]
    starter.reserve(tmp_path, files)
    assert starter.kept == 4 and asked == ([files] if reserves else [])
    with tmpfs_directory() as shm:
        ReservedPages(NodeStore(shm, 'run', 'c')).reserve([8192])
        starter.lose_node(0, lambda name: NodeStore(shm, 'run', name))
    assert starter.in_advance == 8192 and starter.lost_at is not None
