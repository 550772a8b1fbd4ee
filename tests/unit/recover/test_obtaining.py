# SPDX-License-Identifier: Apache-2.0
"""Whole-job recovery asks a holder that does not answer again before it takes an older window."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.window import directory
from moevement_ext.memory.window.directory import TRIES
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import RankIdentity, Window
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.recover import whole_job
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.whole_job import Predecessor, obtain
from moevement_ext.replicate.client import PeerLost
from tests.unit.memory.samples import RUN, TOPOLOGY, WINDOW, digest, named, tmpfs_directory
from tests.unit.recover.test_sources import replicate
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

pytestmark = pytest.mark.timeout(300)


class Alone:
    """Exchanges of a rank whose peers have nothing to say."""

    def __call__(self, name: str, mine: bytes) -> list[bytes]:
        return [mine, b'']

    def all_agree(self, name: str, mine: bool) -> bool:
        return mine


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

    def obtain(self, refuse: bool = False, forget: bool = False) -> Conversion | None:
        """What the rank finds, with which all agree."""

        def check(header: object) -> None:
            self.checked += 1
            if refuse:
                raise RefusedWindow('of another model')

        rank = SimpleNamespace(
            number=0,
            identity=RankIdentity(RUN, TOPOLOGY, 0),
            exchange=Alone(),
            config=SparseCheckpointConfig(forget=forget),
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


@pytest.mark.parametrize(
    ('starts', 'dense', 'last', 'reason'),
    [
        ([0, 3], 9, 20, 'the dense checkpoint of iteration 9 is newer than every window'),
        ([6, 9], -1, 8, 'training ends at iteration 8, and every newer window is of iteration 8'),
        ([0, 9], 5, 8, 'training ends at iteration 8, and every newer window is of iteration 11'),
    ],
)
def test_windows_that_are_too_old_or_too_new_are_told_apart(
    starts: list[int], dense: int, last: int, reason: str
) -> None:
    windows = [Window(named(start), WINDOW) for start in starts]
    assert whole_job._why_none(windows, [], dense, last).startswith(reason)


def test_a_lost_connection_costs_no_window(obtaining: Obtaining) -> None:
    obtaining.lost = TRIES - 1
    found = obtaining.obtain()
    assert found is not None and found.tier == 'rank 1'
    file = obtaining.memory.windows.file(named(0))
    assert file is not None and digest(file.path) == obtaining.digest
    assert (obtaining.asked, obtaining.told) == (TRIES, [])


def test_window_of_a_silent_holder_is_given_up_only_when_told(
    obtaining: Obtaining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, 'READ_AGAIN_S', 0.0)
    obtaining.lost = 10 * TRIES
    with pytest.raises(UserError, match='rank 1: the connection is lost.*--sparse-ckpt-forget'):
        obtaining.obtain()
    assert obtaining.asked == TRIES
    assert obtaining.obtain(forget=True) is None
    assert len(obtaining.told) == 1


def test_refused_window_is_not_requested_again(obtaining: Obtaining) -> None:
    assert obtaining.obtain(refuse=True) is None
    assert (obtaining.asked, obtaining.checked) == (1, 1)


@pytest.mark.parametrize('failing', [1, 100])
def test_failing_reads_of_a_disk_do_not_start_the_job_over(
    failing: int, obtaining: Obtaining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all ranks read one network file system at once."""
    monkeypatch.setattr(directory, 'READ_AGAIN_S', 0.0)
    job, memory = obtaining.job, obtaining.memory
    obtaining.lost = 100
    memory.disk = DiskWindows(tmp_path, 'run1', 0)
    memory.disk.write(job.commit(0), RankIdentity(RUN, TOPOLOGY, 0))
    memory.windows.discard(named(0))
    really, failures = os.preadv, iter(range(failing))

    def preadv(*arguments: Any) -> int:
        if next(failures, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(*arguments)

    monkeypatch.setattr(os, 'preadv', preadv)
    if failing == 1:
        found = obtaining.obtain()
        assert found is not None and found.tier == 'disk'
    else:
        with pytest.raises(UserError, match=r'rank 0: .*Input/output error.*--sparse-ckpt-forget'):
            obtaining.obtain()
        assert obtaining.obtain(forget=True) is None
    memory.disk.close()
