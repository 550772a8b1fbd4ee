# SPDX-License-Identifier: Apache-2.0
"""Memory of a node that runs in other layouts have left."""

from pathlib import Path

import pytest

from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Shelf, copy_in_file
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.refusal import CorruptWindow
from tests.unit.memory.samples import capacity, commit, make_file, tmpfs_directory


def test_holder_with_a_linked_lock_is_ignored(tmp_path: Path) -> None:
    other = NodeStore(tmp_path, 'run.a', 'node0')
    holder = other.holder_path(0)
    holder.mkdir(parents=True, mode=0o700)
    (holder / 'lock').symlink_to('/etc/passwd')
    assert list(Shelf(NodeStore(tmp_path, 'run.b', 'node0'), None).whole_windows('run.a')) == []


def test_deleted_windows_are_not_kept_mapped() -> None:
    """Their memory would be taken until the job ends."""
    with tmpfs_directory() as shm:
        other = NodeStore(shm, 'run.11111111', 'node0')
        commit(OwnerWindows(other, 0, 0, capacity()), 3)
        other.close()
        shelf = Shelf(NodeStore(shm, 'run.22222222', 'node0'), None)
        (part,) = (part for part, _ in shelf.whole_windows('run.11111111'))
        assert len(shelf.read(part, 0, 0))
        shelf.remove(['run.11111111'])
        assert _mapped(shm)
        shelf.close()
        assert not _mapped(shm)


def test_disk_copy_is_verified_at_each_read() -> None:
    """Its bytes are read anew each time, and may come back damaged."""
    with tmpfs_directory() as shm:
        written = make_file(shm / 'file.window')
        copy = copy_in_file(shm / 'file.window')
        assert len(copy.read(0, 0))
        written.payload(0)[copy.headers[0].records[0].offset] ^= 1
        with pytest.raises(CorruptWindow):
            copy.read(0, 0)


def _mapped(directory: Path) -> list[str]:
    maps = Path('/proc/self/maps').read_text().splitlines()
    return [line for line in maps if str(directory) in line]
