# SPDX-License-Identifier: Apache-2.0
"""A rank keeps as much reserved as the windows in force need."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.budget import Logged
from moevement_ext.memory.mapped import in_pages
from moevement_ext.memory.upstream_log.record import Direction
from moevement_ext.replicate.node_plan import Share
from tests.unit.memory.samples import capacity, identity_of, tmpfs_directory
from tests.unit.replicate.peers import host_memory_of, member_of

LOGGED = Logged(2**15, 2**14)
LOG_BYTES = 2**16 + 2**14


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


def test_files_have_pages_for_the_window_in_force_and_grow_within_the_plan(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own ones and replicas, to the byte of what the plan says of windows of that length."""
    monkeypatch.setenv('MOEVEMENT_NODE', 'node-a')
    config = SparseCheckpointConfig(dir=str(shm), replicas=1, max_window=3)
    shorter = [(capacity(window), 0) for window in (1, 2, 3)]
    share = Share(identity_of(0), capacity(), longest_window=3, window=1, shorter=shorter)
    members = [member_of(node, shorter=shorter) for node in ('node-a', 'node-b')]
    memory = host_memory_of(config, members, share)
    try:
        files = [*shm.rglob('*.window')]
        most = memory.plan.by_kind()
        for window in (1, 3, 2, 1):
            memory.make_room_for(window)
            size = in_pages(capacity(window))
            assert [path.stat().st_blocks * 512 for path in files] == [size] * 4
            kinds = memory.by_kind()
            assert (kinds['own_windows'], kinds['replicas']) == (2 * size, 2 * size)
            if window == 3:
                assert kinds == most
        replicas = memory.server._inboxes[1].windows
        monkeypatch.setattr(replicas, 'make_room', full_but_for(replicas.make_room))
        with pytest.raises(HostMemoryError, match='full'):
            memory.make_room_for(2)
        assert [path.stat().st_blocks * 512 for path in files] == [in_pages(capacity(1))] * 4
        assert memory.window == 1
    finally:
        memory.close(remove=True)


def test_the_log_is_for_the_window_in_force_and_follows_it(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the longest, for which the plan has room from the start."""
    monkeypatch.setenv('MOEVEMENT_NODE', 'node-a')
    config = SparseCheckpointConfig(dir=str(shm), replicas=0, max_window=4)
    share = Share(identity_of(0), capacity(), LOGGED, longest_window=3, window=1)
    memory = host_memory_of(config, [member_of('node-a', logged=LOGGED)], share)
    try:
        assert memory.log is not None
        iteration = LOGGED.iteration_bytes
        longest = memory.plan.by_kind()['log_ring']
        sizes = [memory.log.array.size]
        for window in (2, 1, 3, 4):
            memory.make_room_in_log(window)
            sizes.append(memory.log.array.size)
        steps = [0, 2 * iteration, 2 * iteration, 4 * iteration, 4 * iteration]
        assert sizes == [LOG_BYTES + step for step in steps] and sizes[-1] == longest
        assert 'windows: up to 3 iterations, as 4 do not fit' in memory.describe()
        memory.give_back_log(1)
        memory.log.append(1, Direction.DOWN, torch.zeros(8))
        memory.log.drain()
        assert memory.log.array.size == LOG_BYTES
        assert memory.by_kind()['log_ring'] == in_pages(LOG_BYTES)
    finally:
        memory.close(remove=True)


def full_but_for(make_room: Callable[[int], None]) -> Callable[[int], None]:
    """Without room for more than windows of one slot."""

    def limited(nbytes: int) -> None:
        if nbytes > capacity(1):
            raise HostMemoryError('full')
        make_room(nbytes)

    return limited
