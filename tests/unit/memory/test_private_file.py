# SPDX-License-Identifier: Apache-2.0
"""Files that another user of the node may have placed where a run keeps its memory."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moevement_ext.memory import private_file
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.private_file import ForeignFileError
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import GENERATIONS
from moevement_ext.memory.window.generations import OwnerWindows
from tests.unit.memory.samples import PLAN, capacity, identity_of, named, write_window

REPOSITORY = Path(__file__).parents[3]
NO_RANK = 65534
TEXT = 'a victim wrote this'

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='only root can act as a second user')


@pytest.fixture
def public(shm: Path) -> Path:
    """A directory like /dev/shm: all users may write, and delete only their own files."""
    shm.chmod(0o1777)
    return shm


def victim(public: Path) -> Path:
    path = public / 'thesis.txt'
    path.write_text(TEXT)
    return path


def modes(path: Path) -> list[int]:
    return [entry.lstat().st_mode & 0o7777 for entry in (path, *path.rglob('*'))]


def test_created_files_are_closed_to_other_users(public: Path) -> None:
    store = NodeStore(public / 'memory', 'run1', 'node0')
    OwnerWindows(store, 0, 0, capacity())
    Ledger(store.ledger_path(0), 4, identity_of(0)).close()
    assert {mode & 0o077 for mode in modes(public / 'memory')} == {0}
    store.close()


def test_directory_of_an_earlier_release_is_closed_to_other_users(public: Path) -> None:
    path = public / 'memory' / 'run1' / 'node0'
    path.mkdir(mode=0o755, parents=True)
    private_file.make_directories(public / 'memory', path)
    assert modes(public / 'memory' / 'run1') == [0o700] * 2


def test_directory_writable_by_others_is_refused(public: Path) -> None:
    (public / 'run1').mkdir()
    (public / 'run1').chmod(0o777)
    with pytest.raises(ForeignFileError, match='run1 can be written by other users'):
        NodeStore(public, 'run1', 'node0').lock(0)


def test_root_with_replaceable_content_is_refused(shm: Path) -> None:
    shm.chmod(0o777)
    with pytest.raises(ForeignFileError, match='who could replace what lies in it: chmod o-w'):
        NodeStore(shm, 'run1', 'node0').lock(0)


def test_root_may_be_shared_with_a_group(shm: Path) -> None:
    shm.chmod(0o2775)
    store = NodeStore(shm, 'run1', 'node0')
    OwnerWindows(store, 0, 0, capacity())
    assert {mode & 0o077 for mode in modes(shm)[1:]} == {0}
    store.close()


@pytest.mark.parametrize('level', ['run1', 'run1/node0', 'run1/node0/0', 'run1/node0/0/0'])
def test_symbolic_link_to_a_directory_is_refused(public: Path, level: str) -> None:
    elsewhere = public / 'elsewhere'
    elsewhere.mkdir()
    (public / level).parent.mkdir(parents=True, exist_ok=True)
    (public / level).symlink_to(elsewhere)
    store = NodeStore(public, 'run1', 'node0')
    with pytest.raises(ForeignFileError, match=f'{level} is not a directory'):
        OwnerWindows(store, 0, 0, capacity())
    store.close()
    assert [*elsewhere.iterdir()] == []


def open_lock(directory: Path) -> None:
    NodeStore(directory.parents[2], 'run1', 'node0').lock(0)


def open_log(directory: Path) -> None:
    UpstreamLog(directory / 'upstream-log', 2**16, torch.device('cpu'), 0, pytest.fail).close()


PLANTED: list[tuple[str, Callable[[Path], object]]] = [('lock', open_lock)]
PLANTED += [('upstream-log', open_log)]


@pytest.mark.parametrize('name, use', PLANTED)
@pytest.mark.parametrize('kind', ['symbolic link', 'hard link', 'open to other users', 'regular'])
def test_planted_file_is_neither_followed_nor_written(
    public: Path, name: str, use: Callable[[Path], object], kind: str
) -> None:
    directory = public / 'run1' / 'node0' / '0'
    directory.mkdir(parents=True)
    theirs, planted = victim(public), directory / name
    theirs.chmod(0o600)
    if kind == 'symbolic link':
        planted.symlink_to(theirs)
    elif kind == 'hard link':
        planted.hardlink_to(theirs)
    elif kind == 'regular':
        os.mkfifo(planted, 0o600)
    else:
        planted.write_text(TEXT)
        planted.chmod(0o666)
    with pytest.raises(ForeignFileError, match=kind):
        use(directory)
    assert theirs.read_text() == TEXT
    assert kind != 'open to other users' or planted.read_text() == TEXT


def test_ledger_replaces_a_planted_link(public: Path) -> None:
    theirs = victim(public)
    (public / 'ledger').symlink_to(theirs)
    (public / 'ledger.new').symlink_to(theirs)
    assert Ledger.read_newest(public / 'ledger', identity_of(0)) is None
    Ledger(public / 'ledger', 4, identity_of(0)).close()
    assert theirs.read_text() == TEXT
    assert not (public / 'ledger').is_symlink()


@pytest.mark.parametrize('name', ['free-0.window', f'window-0-{PLAN}.window'])
@pytest.mark.parametrize('mode', [0o666, 0o640])
def test_window_that_others_can_open_is_not_adopted(public: Path, name: str, mode: int) -> None:
    directory = public / 'run1' / 'node0' / '0' / '0'
    directory.mkdir(parents=True)
    planted = WindowFile.create(directory / name, capacity())
    planted.begin(named(0))
    write_window(planted)
    planted.path.chmod(mode)
    with open(
        planted.path, 'rb'
    ) as theirs:  # a user with an open descriptor could read later windows
        store = NodeStore(public, 'run1', 'node0')
        windows = OwnerWindows(store, 0, 0, capacity())
        assert windows.committed() == []
        inodes = [file.path.stat().st_ino for file in windows.files()]
        assert os.fstat(theirs.fileno()).st_ino not in inodes
        assert {file.path.stat().st_mode & 0o777 for file in windows.files()} == {0o600}
    store.close()


# A second user


SECOND_USER = """
import os, pathlib, sys
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
os.setgroups([])
os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[3]))
store = NodeStore(pathlib.Path(sys.argv[1]), sys.argv[2], 'node0')
try:
    print(store.scan())
except Exception as error:
    print(error)
try:
    print(len(OwnerWindows(store, 0, 0, 2**17).files()))
except Exception as error:
    print(type(error).__name__, error)
"""


def as_second_user(*arguments: object) -> str:
    """Output of a process that becomes another user."""
    program = [sys.executable, '-c', SECOND_USER, *map(str, arguments), str(NO_RANK)]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_root
def test_second_user_on_the_node_can_run(public: Path) -> None:
    first = NodeStore(public, 'run-a', 'node0')
    OwnerWindows(first, 0, 0, capacity())
    assert as_second_user(public, 'run-b') == f'[]\n{GENERATIONS}\n'
    assert (public / 'run-b').stat().st_uid == NO_RANK
    first.close()


@needs_root
def test_second_user_with_the_same_directory_is_refused(public: Path) -> None:
    first = NodeStore(public / 'memory', 'run-a', 'node0')
    OwnerWindows(first, 0, 0, capacity())
    places = {
        (public / 'memory', 'run-b'): ('cannot be used: Permission denied', 'cannot be listed'),
        (public, 'memory'): ('belongs to user 0', '[]'),
    }
    for place, (refusal, found) in places.items():
        windows, error = as_second_user(*place).splitlines()
        assert found in windows
        assert error.startswith('ForeignFileError') and refusal in error
    first.close()
