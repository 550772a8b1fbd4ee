# SPDX-License-Identifier: Apache-2.0
"""A worker that SIGKILL does not end, such as one blocked in a hung driver."""

import pytest

from moevement_ext.launch import child
from moevement_ext.launch.launcher_events import WorkerLaunched, WorkerUnkillable
from moevement_ext.membership.mailbox import evict
from tests.support.readable import dies
from tests.unit.launch.conftest import Job, failure, unkillable

pytestmark = [pytest.mark.timed, pytest.mark.timeout(60)]


def test_wait_for_the_death_of_a_worker_is_bounded(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, 'TO_DIE_S', 1.0)

    def others_find_it_hung(event: WorkerLaunched) -> None:
        hold(event.pid)
        evict(job.said, 1, job.process(1))

    job.on(WorkerLaunched, others_find_it_hung, rank=1)
    job.finish_when = lambda: False
    with unkillable() as hold:
        assert job.run(nodes=2) == 1
        pid = job.started(1)[0].pid
        assert f'rank 1 (pid {pid}) does not die of SIGKILL' in failure(job)
        assert WorkerUnkillable(1, pid) in job.events
        assert dies(job.started(0)[0].pid)


def test_workers_restart_only_after_all_have_died(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of a rank would write the same files."""
    monkeypatch.setattr(child, 'TO_DIE_S', 1.0)

    def hold_it(event: WorkerLaunched) -> None:
        hold(event.pid)
        job.touch('die')

    job.on(WorkerLaunched, hold_it, rank=1)
    job.finish_when = lambda: False
    with unkillable() as hold:
        assert job.run('0.0=kill:die', survive=False, nodes=2) == 1
        assert len(job.started()) == 2
