# SPDX-License-Identifier: Apache-2.0
import mmap
import threading
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.memory import reservation
from moevement_ext.memory.limits import _MemoryLeft
from moevement_ext.memory.mapped import map_anew
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import ReservedPages
from tests.unit.memory.samples import tmpfs_directory


def test_no_file_follows_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slowly(path: Path, nbytes: int) -> Any:
        made = map_anew(path, nbytes)
        began.set()
        assert go_on.wait(60)
        return made

    monkeypatch.setattr(reservation, 'map_anew', slowly)
    with tmpfs_directory() as root:
        pages = ReservedPages(NodeStore(root, 'run', 'c'))
        reserving = threading.Thread(target=pages.reserve, args=([mmap.PAGESIZE] * 3,))
        reserving.start()
        assert began.wait(60)
        pages.end()
        go_on.set()
        reserving.join()
        assert [path.name for path in pages.path.iterdir()] == ['0']


def test_pages_beyond_the_memory_limit_are_not_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the kernel ends the agent of the spare node."""
    left = _MemoryLeft(2 * mmap.PAGESIZE, tmp_path)
    monkeypatch.setattr(reservation, 'memory_left', lambda: left)
    pages = ReservedPages(NodeStore(tmp_path, 'run', 'c'))
    pages.reserve([mmap.PAGESIZE] * 3)
    assert pages.nbytes() == 0 and f'the memory limit ({tmp_path}) leaves' in caplog.text
    pages.reserve([mmap.PAGESIZE] * 2)
    assert pages.nbytes() > 0
