# SPDX-License-Identifier: Apache-2.0
"""Whole-job recovery asks a holder that does not answer again before it takes an older window."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import RankIdentity, Window
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.recover.sources import TRIES
from moevement_ext.recover.whole_job import Predecessor, Source, obtain
from moevement_ext.replicate.client import PeerLost
from tests.unit.memory.samples import RUN, TOPOLOGY, WINDOW, digest, named, tmpfs_directory
from tests.unit.recover.test_sources import replicate
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

pytestmark = pytest.mark.timeout(300)


class Obtaining:
    """Rank 0 has lost its window; rank 1 holds it, and loses connections at first."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job, self.memory = job, job.ranks[0]
        self.asked = self.lost = self.checked = 0
        self.told: list[object] = []
        file = job.commit(0)
        self.digest = digest(file.path)
        replicate(job, file)
        self.memory.windows.discard(named(0))
        self._fetch = self.memory.fetch
        monkeypatch.setattr(self.memory, 'fetch', self._fetch_with_losses)

    def _fetch_with_losses(self, window: Window, holder: int, *others: Any) -> WindowFile:
        self.asked += 1
        if self.asked <= self.lost:
            raise PeerLost('the connection is lost')
        return self._fetch(window, holder, *others)

    def obtain(self, refuse: bool = False) -> Source | None:
        """What the rank finds, with which all agree."""

        def check(header: object) -> None:
            self.checked += 1
            if refuse:
                raise RefusedWindow('of another model')

        rank = SimpleNamespace(
            number=0,
            identity=RankIdentity(RUN, TOPOLOGY, 0),
            exchange=SimpleNamespace(all_agree=lambda name, mine: mine),
            events=SimpleNamespace(emit=self.told.append),
        )
        predecessor = Predecessor(self.job.inventories(), [], [CANDIDATE], 3, -1)
        return obtain(self.memory, predecessor, rank, check)  # type: ignore[arg-type]


@pytest.fixture
def obtaining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Obtaining]:
    with tmpfs_directory() as shm:
        job = Job(Path(shm), monkeypatch)
        yield Obtaining(job, monkeypatch)
        job.stop()


def test_a_lost_connection_costs_no_window(obtaining: Obtaining) -> None:
    obtaining.lost = TRIES - 1
    found = obtaining.obtain()
    assert found is not None and found.tier == 'rank 1'
    file = obtaining.memory.windows.file(named(0))
    assert file is not None and digest(file.path) == obtaining.digest
    assert (obtaining.asked, obtaining.told) == (TRIES, [])


def test_windows_after_the_obtained_one_are_dropped(obtaining: Obtaining) -> None:
    """Else their names are taken when the replay captures them again."""
    obtaining.job.commit(0, start=WINDOW)
    assert obtaining.obtain() is not None
    windows = obtaining.memory.windows
    assert [window.name for window in windows.committed()] == [named(0)]


def test_silent_holder_is_given_up(obtaining: Obtaining) -> None:
    obtaining.lost = 10 * TRIES
    assert obtaining.obtain() is None
    assert obtaining.asked == TRIES
    assert len(obtaining.told) == 1


def test_refused_window_is_not_requested_again(obtaining: Obtaining) -> None:
    assert obtaining.obtain(refuse=True) is None
    assert (obtaining.asked, obtaining.checked) == (1, 1)
