# SPDX-License-Identifier: Apache-2.0
"""A directory on disk that two processes take for theirs: real processes, real locks."""

import errno
import fcntl
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moevement_ext.errors import UserError
from moevement_ext.memory import disk as module
from moevement_ext.memory.disk import DiskWindows
from tests.distributed.conftest import mounted_tmpfs

pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]

EARLIER = """
import sys
from pathlib import Path
from moevement_ext.memory.disk import DiskWindows

disk = DiskWindows(Path(sys.argv[1]), 'run1', 0)
(disk.path / 'writing-6-plan1.window').write_bytes(b'under way')
print('has it', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def earlier(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the directory, and copies a window."""
    process = subprocess.Popen(
        [sys.executable, '-c', EARLIER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == 'has it\n'
    yield process
    process.kill()
    process.wait()


def test_what_a_live_process_writes_is_left_alone(
    earlier: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, 'LOCK_SECONDS', 0.0)
    with pytest.raises(UserError, match=f'in use by the live process {earlier.pid} on .*--sparse'):
        DiskWindows(tmp_path, 'run1', 0)
    assert (tmp_path / 'run1' / 'rank0' / 'writing-6-plan1.window').exists()
    DiskWindows(tmp_path, 'run1', 1).close()


def test_a_process_that_dies_is_waited_for(
    earlier: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it left under way is worthless then."""
    tried = threading.Event()
    take = module.HolderLock

    def noted(path: Path) -> module.HolderLock:
        try:
            return take(path)
        finally:
            tried.set()

    monkeypatch.setattr(module, 'HolderLock', noted)
    monkeypatch.setattr(module, 'LOCK_SECONDS', 100.0)
    found: list[DiskWindows] = []
    waiting = threading.Thread(target=lambda: found.append(DiskWindows(tmp_path, 'run1', 0)))
    waiting.start()
    assert tried.wait(60)
    earlier.kill()
    waiting.join(60)
    assert not list(found[0].path.glob('writing-*'))
    found[0].close()


def test_closed_or_removed_it_is_free(tmp_path: Path) -> None:
    first = DiskWindows(tmp_path, 'run1', 0)
    first.close()
    second = DiskWindows(tmp_path, 'run1', 0)
    second.remove()
    assert list(tmp_path.iterdir()) == []
    DiskWindows(tmp_path, 'run1', 0).close()


def test_a_full_disk_can_be_locked_and_read(tmp_path: Path) -> None:
    """A job that starts again finds its windows there, whatever can be written."""
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


def test_a_file_system_without_locks_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', flock)
    with caplog.at_level(logging.WARNING):
        disk = DiskWindows(tmp_path, 'run1', 0)
    assert 'No locks available' in caplog.text
    disk.remove()
    assert list(tmp_path.iterdir()) == []
