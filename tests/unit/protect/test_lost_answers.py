# SPDX-License-Identifier: Apache-2.0
"""A rank's connection to the store is lost between two steps of a report or of a withdrawal."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, Store, TCPStore

from moevement_ext.memory.window.name import Agreed, WindowName
from moevement_ext.protect import persistence
from moevement_ext.protect.persistence import PersistenceTracker
from tests.unit.replicate.peers import wait_for

pytestmark = pytest.mark.timed

FIRST, SECOND = WindowName(0, 'a'), WindowName(4, 'a')
COUNT = 'complete/4/a'


class Flaky(Store):
    """A connection that is lost once, in the `add` of a number, before or after its execution."""

    def __init__(self, store: Store, number: int, executed: bool) -> None:
        super().__init__()
        self._store = store
        self._losing: int | None = number
        self._executed = executed

    def add(self, key: str, number: int) -> int:
        lost = number == self._losing
        if lost:
            self._losing = None
        found = self._store.add(key, number) if not lost or self._executed else 0
        if lost:
            raise DistNetworkError('the connection is lost')
        return found

    def clone(self) -> Store:
        return self

    def set_timeout(self, timeout: timedelta) -> None: ...

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self._store.compare_set(key, expected, wanted)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)


class Job:
    """Rank 0 of two, whose other rank reports nothing."""

    def __init__(self) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.agreed: list[Agreed] = []
        self._tracker: PersistenceTracker | None = None

    def tracker(self, number: int, executed: bool) -> PersistenceTracker:
        store = TCPStore('127.0.0.1', self.store.port, is_master=False)
        flaky = Flaky(store, number, executed)
        self._tracker = PersistenceTracker(flaky, 0, 2, self.agreed.append)
        return self._tracker

    def stop(self) -> None:
        if self._tracker is not None:
            self._tracker.stop()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(persistence, '_FIRST_RETRY_SECONDS', 0.01)
    job = Job()
    yield job
    job.stop()


@pytest.mark.parametrize(('executed', 'count'), [(False, 0), (True, 1)])
def test_report_whose_answer_is_lost_counts_at_most_once(
    executed: bool, count: int, job: Job
) -> None:
    """Else a window would be persisted that the other rank lacks.

    As it may not count, the ranks give it up; they would wait for it, and skip those after it.
    """
    tracker = job.tracker(1, executed)
    tracker.report(SECOND)
    wait_for(lambda: not tracker._tasks)
    assert job.store.add(COUNT, 0) == count
    assert job.agreed == [Agreed(None, (SECOND.start,))]


@pytest.mark.parametrize(('executed', 'count'), [(False, 0), (True, -1)])
def test_withdrawal_that_is_cut_off_is_repeated(executed: bool, count: int, job: Job) -> None:
    """Else the abandoned capture would still count; the count may be too low for its successor."""
    tracker = job.tracker(-1, executed)
    tracker.report(SECOND)
    tracker.withdraw_after(FIRST)
    assert not tracker._tasks
    assert job.store.add(COUNT, 0) == count
    assert job.agreed == [Agreed(None, (SECOND.start,))]
