# SPDX-License-Identifier: Apache-2.0
"""A recovery withdraws windows whose transfer is still under way; only the holder is a fake."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moevement_ext.events import EventLog
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import Agreed, WindowName
from moevement_ext.protect.lifecycle import WindowLifecycle
from moevement_ext.protect.statistics import CaptureStatistics
from tests.unit.memory.samples import WINDOW, capacity, commit, named, tmpfs_directory
from tests.unit.replicate.peers import OWNER, SlowPeer, own_file, wait_for

pytestmark = pytest.mark.timed


class Tracker:
    def __init__(self, agreed: Callable[[Agreed], None]) -> None:
        self.reports: list[WindowName] = []

    def report(self, window: WindowName) -> None:
        self.reports.append(window)

    def withdraw_after(self, window: WindowName) -> None: ...


class Protected:
    """Windows 0 and 3, the newer one in transfer to a holder."""

    def __init__(self, shm: Path) -> None:
        self._store = NodeStore(shm, 'run1', 'node0')
        self.windows = OwnerWindows(self._store, OWNER, OWNER, capacity(), generations=4)
        self.peer = SlowPeer()
        self.lifecycle = WindowLifecycle(
            OWNER,
            self.windows,
            {1: self.peer},
            Tracker,  # type: ignore[arg-type]
            lambda window: None,
            CaptureStatistics(EventLog(None, OWNER)),
            0.0,
        )
        for start in (0, WINDOW):
            commit(self.windows, start)
        self.offer(WINDOW)
        assert self.peer.next_asked() == named(WINDOW)

    def offer(self, start: int) -> None:
        file = own_file(self.windows, start)
        for slot in file.slots():
            self.lifecycle.replicator.submit(file, slot, urgent=True)

    @property
    def reports(self) -> list[WindowName]:
        return self.lifecycle._tracker.reports  # type: ignore[attr-defined]

    def stop(self) -> None:
        self.peer.answers.set()
        self.lifecycle.stop()
        self._store.close()


@pytest.fixture
def protected() -> Iterator[Protected]:
    with tmpfs_directory() as shm:
        made = Protected(shm)
        yield made
        made.stop()


def test_window_whose_transfer_ends_after_its_withdrawal_is_not_reported(
    protected: Protected,
) -> None:
    """Else the others may overwrite the window from which this rank recovers."""
    protected.lifecycle.withdraw_after(named(0))
    protected.peer.answers.set()
    protected.offer(0)
    wait_for(lambda: named(0) in protected.reports)
    assert protected.reports == [named(0)]


def test_a_rank_and_its_holders_drop_what_is_captured_again(protected: Protected) -> None:
    protected.lifecycle.go_back_to(named(0))
    assert [window.name for window in protected.windows.committed()] == [named(0)]
    protected.peer.answers.set()
    assert protected.peer.next_asked() == 0
