# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import OwnerWindows
from tests.unit.memory.samples import RUN, TOPOLOGY, capacity, commit, named, restart


@pytest.mark.parametrize('run_id', ['', '..', 'a/b', '-x'])
def test_run_id_must_be_a_directory_name(shm: Path, run_id: str) -> None:
    with pytest.raises(ConfigurationError, match='--sparse-ckpt-run-id'):
        NodeStore(shm, run_id, 'node0')


def test_forked_child_does_not_keep_the_lock(store: NodeStore) -> None:
    """A data loader worker that outlives its trainer must not lock out the next trainer."""
    store.lock(0)
    read_end, write_end = os.pipe()
    started, starting = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.write(starting, b'x')
        os.read(read_end, 1)  # until the parent closes its end
        os._exit(0)
    os.close(read_end)
    try:
        assert os.read(started, 1) == b'x'
        second = restart(store)
        second.lock(0)
        second.close()
    finally:
        os.close(write_end)
        os.waitpid(child, 0)
        os.close(started)
        os.close(starting)


# Scan and removal


def test_scan_finds_committed_windows_of_all_holders(store: NodeStore) -> None:
    assert store.scan() == []
    for holder, owner, start in ((0, 0, 0), (0, 5, 3), (1, 1, 3)):
        commit(OwnerWindows(store, holder, owner, capacity()), start)
    unfinished = OwnerWindows(store, 1, 7, capacity()).begin(named(9))
    assert unfinished is not None
    found = NodeStore(store.root, store.run_id, 'node0').scan()
    assert [window[:3] for window in found] == [
        (1, 1, named(3)),
        (0, 5, named(3)),
        (0, 0, named(0)),
    ]
    assert all(WindowFile.open(window.path).verify(Expected(RUN, TOPOLOGY)) for window in found)
    assert NodeStore(store.root, store.run_id, 'node1').scan() == []
    assert NodeStore(store.root, 'run2', 'node0').scan() == []


def test_clean_exit_removes_all_files_of_the_run(store: NodeStore) -> None:
    other = NodeStore(store.root, store.run_id, 'node1')
    OwnerWindows(store, 0, 0, capacity())
    OwnerWindows(store, 1, 1, capacity())
    OwnerWindows(other, 2, 2, capacity())
    store.remove_rank(0)
    assert [path.name for path in store.path.iterdir()] == ['1']
    store.remove_rank(1)
    assert not store.path.exists()
    other.remove()
    assert list(store.root.iterdir()) == []


def test_files_of_former_holders_and_owners_are_removed(store: NodeStore) -> None:
    alive = NodeStore(store.root, store.run_id, 'node0')
    elsewhere = NodeStore(store.root, store.run_id, 'node1')
    for holder, owner in ((0, 0), (0, 5), (0, 6)):
        commit(OwnerWindows(store, holder, owner, capacity()), 3)
    commit(OwnerWindows(alive, 1, 1, capacity()), 3)
    gone = NodeStore(store.root, store.run_id, 'node0')
    commit(OwnerWindows(gone, 2, 2, capacity()), 3)
    commit(OwnerWindows(gone, 3, 3, capacity()), 3)
    gone.close()
    commit(OwnerWindows(elsewhere, 4, 4, capacity()), 3)

    store.remove_owners_but({0, 5}, holder=0)
    store.remove_holders_but({0, 3})
    assert {(window.holder, window.owner) for window in store.scan()} == {
        (0, 0), (0, 5), (1, 1), (3, 3),
    }  # fmt: skip
    assert sorted(path.name for path in store.path.iterdir()) == ['0', '1', '3']
    assert len(elsewhere.scan()) == 1
    for other in (alive, elsewhere):
        other.close()


def test_rank_that_gives_up_leaves_what_the_others_share(tmp_path: Path) -> None:
    """Else the next rank that joins finds no secret, and the whole job restarts."""
    stores = [NodeStore(tmp_path, 'run1', 'node0') for _ in range(2)]
    for rank, store in enumerate(stores):
        store.lock(rank)
    stores[0].shared.mkdir()
    (stores[0].shared / 'secret').write_bytes(b'theirs')
    stores[0].remove_rank(0)
    assert (stores[1].shared / 'secret').exists()
    stores[1].remove_rank(1)
    assert list(tmp_path.iterdir()) == []
