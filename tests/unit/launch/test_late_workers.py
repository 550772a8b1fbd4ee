# SPDX-License-Identifier: Apache-2.0
"""Replacements that hang before they join the other ranks."""

from collections.abc import Sequence

import pytest
from torch.distributed import Store

from moevement_ext.events import Event
from moevement_ext.launch import supervisor, worker
from moevement_ext.launch.launcher_events import WorkerEnded, WorkerLate, WorkerLaunched
from moevement_ext.launch.worker import Worker
from tests.unit.launch.conftest import Job

pytestmark = [pytest.mark.timed, pytest.mark.timeout(60)]


def report_joining(job: Job, *attempts: tuple[int, int]) -> None:
    def note(event: Event) -> None:
        if isinstance(event, WorkerLaunched) and (event.rank, event.restarts) in attempts:
            job.said.set(f'joining/{event.rank}', str(job.process(event.rank)))

    job.on_event = note


def test_replacement_that_does_not_join_is_replaced(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its peers, which have joined, would wait until they give up the job."""
    monkeypatch.setattr(worker, '_TO_JOIN_S', 1.0)
    report_joining(job, (0, 0), (1, 0), (1, 2))
    job.finish_when = lambda: len(job.started(1)) == 3
    assert job.run('1.0=kill', '1.1=stop', nodes=2) == 0
    late = job.seen(WorkerLate)
    assert late == [WorkerLate(1, job.started(1)[1].pid)]


def test_first_process_of_a_rank_may_join_late(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank was replaced while this one still imports, as after a cold start."""
    monkeypatch.setattr(worker, '_TO_JOIN_S', 1.0)
    report_joining(job, (0, 0), (0, 1))

    def judge_both(store: Store, living: Sequence[Worker]) -> list[Worker]:
        late = worker.late_workers(store, living)
        if len(living) == 2 and all(worker.child.is_settled for worker in living):
            job.finish()
        return late

    monkeypatch.setattr(supervisor, 'late_workers', judge_both)
    job.finish_when = lambda: False
    assert job.run('0.0=kill', nodes=2) == 0
    assert job.seen(WorkerLate) == []


def test_no_worker_is_late_at_the_start_of_a_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, '_TO_JOIN_S', 0.0)
    looks = []
    launcher = job.supervisor(nodes=2)
    look = launcher._look_into_store

    def counted() -> None:
        look()
        looks.append(1)
        if len(looks) == 10:
            job.finish()

    monkeypatch.setattr(launcher, '_look_into_store', counted)
    job.finish_when = lambda: False
    assert launcher.run() == 0
    assert [event.code for event in job.seen(WorkerEnded)] == [0, 0]
