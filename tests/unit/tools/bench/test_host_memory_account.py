# SPDX-License-Identifier: Apache-2.0
import mmap
import os
from pathlib import Path

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
from tests.unit.memory.samples import capacity, commit, tmpfs_directory
from tools.bench.host_memory import files_by_kind, private_bytes


def test_files_are_distinguished_by_holder_and_state() -> None:
    with tmpfs_directory() as shm:
        store = NodeStore(shm, 'run', 'node')
        for owner in (0, 1):
            commit(OwnerWindows(store, 0, owner, capacity()), 0)
        (store.holder_path(0) / 'upstream-log').write_bytes(bytes(mmap.PAGESIZE))
        found = files_by_kind(shm)
        store.close()
    size = -(-capacity() // mmap.PAGESIZE) * mmap.PAGESIZE
    kinds = ('own whole', 'own next', 'replica whole', 'replica next')
    assert [found[kind] for kind in kinds] == [size] * 4
    assert found['log'] == mmap.PAGESIZE


def test_private_memory_of_a_process_grows_with_its_allocations() -> None:
    before = private_bytes(os.getpid())
    kept = bytearray(b'x') * 2**26
    after = private_bytes(os.getpid())
    assert after.total() - before.total() > 2**25 and len(kept) == 2**26
    assert not private_bytes(2**22 + 1) or Path(f'/proc/{2**22 + 1}').exists()
