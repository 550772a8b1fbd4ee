# SPDX-License-Identifier: Apache-2.0
"""Window files that another program removes, like cleaners of temporary files, or places there."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import OwnerWindows
from tests.distributed.conftest import mounted_tmpfs
from tests.unit.memory.samples import begun, capacity, commit, named, restart, write_window


def persist(windows: OwnerWindows, start: int) -> None:
    commit(windows, start)
    windows.persisted(named(start))


def test_file_removed_during_a_write_costs_one_window(store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, capacity())
    persist(windows, 0)
    for start in range(3, 12, 3):
        file = begun(windows, start)
        write_window(file)
        file.path.unlink()
        with pytest.raises(FileNotFoundError):
            windows.commit(file)
        windows.abandon(file)
    persist(windows, 12)
    assert [found.name.start for found in store.scan()] == [12, 0]


def test_window_that_this_process_cannot_open_is_kept(
    store: NodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = commit(OwnerWindows(store, 0, 0, capacity()), 0).path
    again = restart(store)
    really = os.open

    def out_of_files(name: object, *others: int) -> int:
        if name == path:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(name, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(os, 'open', out_of_files)
    with pytest.raises(HostMemoryError, match=f'{path}: cannot be opened: Too many open files'):
        OwnerWindows(again, 0, 0, capacity())
    monkeypatch.undo()
    assert len(OwnerWindows(again, 0, 0, capacity()).committed()) == 1
    again.close()


@pytest.mark.parametrize('level', ['files', 'owner', 'run'])
def test_windows_are_kept_again_after_all_files_were_removed(level: str, store: NodeStore) -> None:
    windows = OwnerWindows(store, 0, 0, capacity(), holdable=True)
    for start in (0, 3):
        persist(windows, start)
    if level == 'files':
        for path in windows.path.iterdir():
            path.unlink()
    else:
        shutil.rmtree(windows.path if level == 'owner' else store.path.parent)
    kept = windows.file(named(3))
    assert kept is not None
    kept.verify(Expected())  # the file is still mapped
    for start in (6, 9, 12):
        persist(windows, start)
    assert [found.name.start for found in store.scan()] == [12, 9, 6]
    windows.discard_after(-1)
    persist(windows, 0)


def test_removed_file_is_replaced_once_there_is_space(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / 'small', f'{4 * capacity() // 1024}k') as root:
        windows = OwnerWindows(NodeStore(root, 'run1', 'node0'), 0, 0, capacity())
        persist(windows, 0)
        mapped = windows.files()  # as by a reader, which keeps their pages
        (free,) = windows.path.glob('free-*')
        free.unlink()
        hog = root / 'hog'
        with open(hog, 'wb', buffering=0) as file, pytest.raises(OSError, match='No space'):
            while True:
                file.write(bytes(4096))
        for start in (3, 6):
            with pytest.raises(HostMemoryError, match='cannot keep 2 windows'):
                windows.begin(named(start))
        hog.unlink()
        assert mapped
        persist(windows, 9)
        assert {found.name.start for found in windows.committed()} == {0, 9}


ADOPTS = """
import sys
from pathlib import Path
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
from tests.unit.memory.samples import named

store = NodeStore(Path(sys.argv[1]), 'run1', 'node0')
try:
    windows = OwnerWindows(store, 0, 0, int(sys.argv[2]))
except HostMemoryError as error:
    print('refused:', error)
else:
    windows.discard_after(-1)
    for file in windows.files():
        file.array[:] = 1
"""


def test_sparse_file_is_fully_reserved_before_a_write(
    tmp_path: Path,
) -> None:
    """A copy from disk is sparse; a write to a hole in a full tmpfs would end the process."""
    nbytes = 2**20
    with mounted_tmpfs(tmp_path / 'small', '4m') as root:
        store = NodeStore(root, 'run1', 'node0')
        windows = OwnerWindows(store, 0, 0, nbytes)
        path = commit(windows, 0).path
        used = max(file.used_bytes() for file in windows.files())
        store.close()
        content = path.read_bytes()
        path.unlink()
        del windows
        path.write_bytes(content[:used])
        path.chmod(0o600)
        os.truncate(path, nbytes)
        with open(root / 'hog', 'wb', buffering=0) as hog, pytest.raises(OSError, match='No space'):
            while True:
                hog.write(bytes(4096))
        command = [sys.executable, '-c', ADOPTS, str(root), str(nbytes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert 'refused: cannot reserve 1048576 bytes' in done.stdout, (
            done.returncode,
            done.stderr,
        )
        assert path.exists(), 'it may be the only one'
        (root / 'hog').unlink()
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stdout) == (0, '')
