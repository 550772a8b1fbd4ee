# SPDX-License-Identifier: Apache-2.0
"""Loss of a store outside the launcher."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import DistError

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event
from moevement_ext.launch import supervisor, worker
from moevement_ext.launch.launcher_events import StoreFound, StoreGone, WorkerEnded, WorkerLaunched
from tests.unit.launch.conftest import Job, failure
from tests.unit.store.processes import Server

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


class OutsideStore:
    """A server at the same port in all its attempts."""

    def __init__(self) -> None:
        self.server = Server()
        self.port = self.server.port
        self.flag = f'--sparse-ckpt-store=127.0.0.1:{self.port}'

    def start(self) -> None:
        self.server = Server(self.port)

    def end(self) -> None:
        self.server.close()


@pytest.fixture
def store() -> Iterator[OutsideStore]:
    one = OutsideStore()
    yield one
    one.end()


def test_dead_worker_waits_for_the_store(job: Job, store: OutsideStore) -> None:
    """Workers that end without a store restart with the next store; training continues."""

    job.on(WorkerLaunched, lambda event: store.end(), rank=1, restarts=0)
    job.on(StoreGone, lambda event: job.touch('leave'))
    job.on(WorkerEnded, lambda event: store.start(), code=EXIT_WHOLE_JOB)
    job.finish_when = lambda: len(job.started()) == 4
    flags = (f'1.0=exit:{EXIT_WHOLE_JOB}:leave', store.flag)
    assert job.run(*flags, nodes=2) == 0
    assert (len(job.seen(StoreGone)), len(job.seen(StoreFound))) == (1, 1)
    assert [worker.restarts for worker in job.started()] == [0, 0, 1, 1]


@pytest.mark.parametrize('action', ['kill', 'exit:3'])
def test_store_lost_while_all_start_again_is_awaited(
    action: str, job: Job, store: OutsideStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers are dead then: no later end would start them again. An error counts once."""
    monkeypatch.setattr(supervisor, '_SETTLE_S', 0.0)
    monkeypatch.setattr(worker, '_MAX_ERRORS', 2)
    flags = (f'1.0={action}', store.flag)
    outcome = job.supervisor(*flags, nodes=2, survive=False)._outcome
    really = outcome.all_lost
    lost = []

    def all_lost(*told: Any) -> None:
        if not lost:
            lost.append(told)
            raise DistError('connection reset by peer')
        really(*told)

    monkeypatch.setattr(outcome, 'all_lost', all_lost)
    job.finish_when = lambda: len(job.started()) == 4
    assert job.running.run() == 0
    assert (len(job.seen(StoreGone)), len(job.seen(StoreFound))) == (1, 1)
    assert [worker.restarts for worker in job.started()] == [0, 0, 1, 1]


def test_stopped_store_is_lost_until_it_continues(
    job: Job, store: OutsideStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel still accepts connections and requests."""
    monkeypatch.setattr(supervisor, '_TO_ANSWER_S', 2.0)

    job.on(WorkerLaunched, lambda event: store.server.stand_still(), rank=1)
    job.on(StoreGone, lambda event: store.server.go_on())
    job.finish_when = lambda: bool(job.seen(StoreFound))
    assert job.run(store.flag, nodes=2) == 0
    assert len(job.started()) == 2


def test_wait_of_a_worker_for_the_store_is_bounded(
    job: Job, store: OutsideStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, '_WITHOUT_STORE_S', 2.0)

    def note(event: Event) -> None:
        store.end()
        job.touch('leave')

    job.on(WorkerLaunched, note, rank=1)
    job.finish_when = lambda: False
    assert job.run(f'1.0=exit:{EXIT_WHOLE_JOB}:leave', store.flag, nodes=2) == 1
    refusal = f'--sparse-ckpt-store 127.0.0.1:{store.port}'
    assert f'no worker can take its place: {refusal}' in failure(job)
    assert len(job.seen(WorkerEnded)) == 2
