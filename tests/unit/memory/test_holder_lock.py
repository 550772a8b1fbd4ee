# SPDX-License-Identifier: Apache-2.0
"""A directory that two processes claim, on disk or in memory: real locks."""

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from moevement_ext.errors import UserError
from moevement_ext.memory import holder_lock as module
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.name import RankIdentity
from tests.distributed.conftest import mounted_tmpfs
from tests.unit.memory.samples import RUN, TOPOLOGY, make_file

pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]

EARLIER = """
import sys
from pathlib import Path
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.node_store import NodeStore

root = Path(sys.argv[1])
memory = NodeStore(root / 'memory', 'run1', 'node0')
memory.lock(0)
disk = DiskWindows(root, 'run1', 0)
(disk.path / 'writing-6-plan1.window').write_bytes(b'under way')
print('has it', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def earlier(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the directories of a rank and copies a window."""
    process = subprocess.Popen(
        [sys.executable, '-c', EARLIER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == 'has it\n'
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released at each attempt to take a lock."""
    take, tries = module.HolderLock, threading.Semaphore(0)

    def noted(path: Path) -> module.HolderLock:
        try:
            return take(path)
        finally:
            tries.release()

    monkeypatch.setattr(module, 'HolderLock', noted)
    return tries


def take_disk(root: Path) -> DiskWindows:
    return DiskWindows(root, 'run1', 0)


def take_memory(root: Path) -> NodeStore:
    store = NodeStore(root / 'memory', 'run1', 'node0')
    store.lock(0)
    return store


Take = Callable[[Path], DiskWindows | NodeStore]
either = pytest.mark.parametrize('take', [take_disk, take_memory])


class Waiting:
    """A thread that takes a directory which another process holds."""

    def __init__(self, take: Take, root: Path) -> None:
        self._thread = threading.Thread(target=lambda: self._found.append(take(root)))
        self._found: list[DiskWindows | NodeStore] = []
        self._thread.start()

    def close(self) -> None:
        """Wait until it holds the directory, and close it."""
        self._thread.join(60)
        self._found[0].close()


def test_directory_of_a_live_process_is_not_touched(
    earlier: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, 'LOCK_S', 0.0)
    with pytest.raises(UserError, match=f'in use by the live process {earlier.pid} on .*--sparse'):
        DiskWindows(tmp_path, 'run1', 0)
    assert (tmp_path / 'run1' / 'rank0' / 'writing-6-plan1.window').exists()
    DiskWindows(tmp_path, 'run1', 1).close()


@either
@pytest.mark.parametrize('known', [False, True])
def test_dying_process_is_waited_for(
    take: Take,
    known: bool,
    earlier: subprocess.Popen[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tried: threading.Semaphore,
) -> None:
    """As long as it takes if it is known to die, as with much pinned memory.

    Its unfinished copy is then deleted.
    """
    monkeypatch.setattr(module, 'LOCK_S', 0.0 if known else 100.0)
    if known:
        monkeypatch.setattr(module, '_dies', lambda holder: holder.startswith(f'{earlier.pid} on '))
    waiting = Waiting(take, tmp_path)
    for _ in range(1 + known):
        assert tried.acquire(timeout=60)
    earlier.kill()
    waiting.close()
    if take is take_disk:
        assert not list((tmp_path / 'run1' / 'rank0').glob('writing-*'))


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[str]]:
    """The lock of a host that is gone, which a network file system still holds."""
    monkeypatch.setattr(module, 'LOCK_S', 0.0)
    monkeypatch.setattr(module, 'is_in_memory', lambda path: False)
    directory = tmp_path / 'run1' / 'rank0'
    directory.mkdir(parents=True)
    lock = directory / 'lock'
    lock.write_text('1 on a-host-that-is-gone')
    lock.chmod(0o600)
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield held


def test_lock_of_a_host_that_is_gone_is_waited_for(
    gone: IO[str], tmp_path: Path, tried: threading.Semaphore, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(take_disk, tmp_path)
    for _ in range(3):
        assert tried.acquire(timeout=60)
    gone.close()
    waiting.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert 'a-host-that-is-gone: if that host is gone, the file system frees' in said


def test_rank_that_joins_copies_once_such_a_lock_is_free(
    gone: IO[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskWindows(tmp_path, 'run1', 0, joining=True)
    file = make_file(tmp_path / 'memory')
    with pytest.raises(module.StoreInUseError, match='a-host-that-is-gone'):
        disk.write(file, RankIdentity(RUN, TOPOLOGY, 0))
    assert not disk.stored()
    monkeypatch.setattr(module, 'ELSEWHERE_S', 0.0)
    with pytest.raises(module.StoreInUseError):
        DiskWindows(tmp_path, 'run1', 0)
    gone.close()
    disk.write(file, RankIdentity(RUN, TOPOLOGY, 0))
    assert len(disk.stored()) == 1
    disk.close()


def test_process_that_never_dies_is_named_with_the_remedy(
    earlier: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, 'TO_DIE_S', 0.0)
    monkeypatch.setattr(module, '_dies', lambda holder: True)
    with pytest.raises(UserError, match=f'process {earlier.pid} on .* still waits .*restarted'):
        take_disk(tmp_path)


def test_dying_holder_is_recognized_on_its_own_machine(
    earlier: subprocess.Popen[str], tmp_path: Path
) -> None:
    lock = tmp_path / 'run1' / 'rank0' / 'lock'
    who = lock.read_text()
    assert not module._dies(who)
    earlier.kill()
    os.waitid(os.P_PID, earlier.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but is not reaped yet
    assert module._dies(who)
    assert not module._dies(who + 'elsewhere')
    earlier.wait()
    assert not module._dies(who) and not module._dies('')


def test_full_disk_can_be_locked_and_read(tmp_path: Path) -> None:
    """A restarted job finds its windows there, even if it cannot write."""
    with mounted_tmpfs(tmp_path / 'full', '16k') as root:
        DiskWindows(root, 'run1', 0).close()
        with open(root / 'hog', 'wb', buffering=0) as hog, pytest.raises(OSError, match='No space'):
            while True:
                hog.write(bytes(4096))
        (root / 'run1' / 'rank0' / 'lock').write_bytes(b'')
        with open(root / 'hog', 'ab', buffering=0) as hog, suppress(OSError):
            hog.write(bytes(4096))
        disk = DiskWindows(root, 'run1', 0)
        assert disk.stored() == []
        disk.close()


def test_file_system_without_locks_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', flock)
    with caplog.at_level(logging.WARNING):
        disk = DiskWindows(tmp_path, 'run1', 0)
    assert 'No locks available' in caplog.text
    disk.remove(past=0)
    assert list(tmp_path.iterdir()) == []
