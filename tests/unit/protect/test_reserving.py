# SPDX-License-Identifier: Apache-2.0
"""With `auto` windows are as long as host memory of all nodes has room for."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.memory import budget, holder_lock
from moevement_ext.memory.budget import Logged, window_lengths
from moevement_ext.memory.file_system import GIB, reserved_bytes
from moevement_ext.memory.holder_lock import StoreInUseError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.protect.protection import longest_window, reserve
from moevement_ext.replicate import secret
from moevement_ext.replicate.node_plan import ALONE, JobMemory, Member, Share
from moevement_ext.replicate.placement import Copies
from tests.unit.memory.samples import commit

LOGGED = Logged(2**15, 2**14)
MOST = 8


def capacity(window: int) -> int:
    return 2**20 + window * 2**16


def stub(window: int) -> int:
    return 2**16 + window * 2**14


def needed(window: int) -> int:
    """Bytes of this node, with one replica of the rank of the other."""
    members = [
        Member(node=node, capacity_bytes=capacity(window), logged=LOGGED, host='', salt=b'')
        for node in (node_name(), 'another')
    ]
    copies = Copies([(), ()], [(1,), (0,)])
    return JobMemory(members, copies, window, 1.0, False).of_node(node_name(), window).node_total


@pytest.fixture
def find(shm: Path) -> Callable[..., int]:
    """W that rank 0 of two finds."""

    def find(
        elsewhere: int = MOST, family: int = ALONE, shared: bool = False, **settings: Any
    ) -> int:
        def exchange(name: str, own: bytes) -> list[bytes]:
            if name == 'longest-window':
                return [own, msgspec.msgpack.encode(window_lengths(MOST).index(elsewhere))]
            other = msgspec.msgpack.decode(own, type=Member)
            memory = other.memory if shared else ''
            other = msgspec.structs.replace(other, node='another', memory=memory)
            return [own, msgspec.msgpack.encode(other)]

        config = SparseCheckpointConfig(
            **{'dir': str(shm), 'replicas': 1, 'max_window': MOST, **settings}
        )
        rank: Any = SimpleNamespace(config=config, exchange=exchange, run_id='run1')
        lengths = window_lengths(MOST)
        share = Share(
            RankIdentity('run', 'topology', 0),
            capacity(MOST),
            LOGGED,
            shorter=[(capacity(length), stub(length)) for length in lengths],
            family=family,
        )
        return longest_window(rank, share)

    return find


@pytest.mark.parametrize('window', [1, 2, 5, 7])
def test_window_length_fits_memory_to_the_byte(window: int, find: Callable[..., int]) -> None:
    assert find(host_memory_gb=needed(window) / GIB) == window
    assert find(host_memory_gb=(needed(window + 1) - 1) / GIB) == window


def needed_for_a_twin(window: int) -> int:
    """Bytes of this node, with the stub of the rank of the other, which captures the same."""
    members = [
        Member(
            node=node,
            capacity_bytes=capacity(window),
            logged=LOGGED,
            host='',
            salt=b'',
            domain='',
            family=0,
            stub_bytes=stub(window),
        )
        for node in (node_name(), 'another')
    ]
    copies = Copies([(1,), (0,)], [(), ()])
    return JobMemory(members, copies, window, 1.0, False).of_node(node_name(), window).node_total


@pytest.mark.parametrize('window', [1, 2, 5, 7])
def test_window_length_fits_memory_beside_a_twin_to_the_byte(
    window: int, find: Callable[..., int]
) -> None:
    assert needed_for_a_twin(window) == needed(window) - 2 * (capacity(window) - stub(window))
    assert find(family=0, host_memory_gb=needed_for_a_twin(window) / GIB) == window
    assert find(family=0, host_memory_gb=(needed_for_a_twin(window + 1) - 1) / GIB) == window


@pytest.mark.parametrize('window', [1, 2, 5])
def test_nodes_in_one_file_system_count_its_free_bytes_once(
    window: int, find: Callable[..., int], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As emulated nodes, or two agents on one machine; also when the other's files are there."""
    free = 2 * (needed(window) + budget.MARGIN_BYTES)
    monkeypatch.setattr(budget, 'free_bytes', lambda directory: free)
    assert find() > find(shared=True) == window
    folder = shm / 'run1' / 'another' / '1'
    folder.mkdir(parents=True)
    (folder / 'reserved').write_bytes(bytes(needed(window)))
    free = needed(window) + budget.MARGIN_BYTES
    assert find(shared=True) == window


def test_the_node_with_the_least_decides(find: Callable[..., int]) -> None:
    assert find(elsewhere=2) == 2


def test_running_job_of_the_same_name_keeps_its_secret(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement in that job needs it."""
    monkeypatch.setattr(holder_lock, 'LOCK_S', 0.0)
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    running = NodeStore(shm, 'run1', node_name())
    running.lock(0)
    theirs = secret._drawn(running)

    class Alone:
        joining = False

        def __call__(self, name: str, own: bytes) -> list[bytes]:
            return [own]

    config = SparseCheckpointConfig(dir=str(shm))
    rank: Any = SimpleNamespace(config=config, exchange=Alone(), run_id='run1', number=0)
    share: Any = None  # not needed before the refusal
    with pytest.raises(StoreInUseError, match='another job runs with the same'):
        reserve(rank, share, torch.device('cpu'), lambda reason: None)
    assert (running.shared / 'secret').read_bytes() == theirs
    running.close()


def test_restart_plans_the_windows_that_it_finds(
    shm: Path, find: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first start, though a restart needs no margin, so that files are adopted."""
    store = NodeStore(shm, 'run1', node_name())
    for owner in (0, 1):
        windows = OwnerWindows(store, 0, owner, capacity(3))
        for start in (0, 3):
            commit(windows, start)
    store.close()
    free = needed(4) - reserved_bytes(store.path)
    monkeypatch.setattr(budget, 'free_bytes', lambda directory: free)
    assert find() == 3
