# SPDX-License-Identifier: Apache-2.0
"""Replacements that hang before they join the other ranks."""

import os
import signal
from collections.abc import Sequence

import pytest
from torch.distributed import Store

from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_USER_ERROR, EXIT_WHOLE_JOB
from moevement_ext.events import Event
from moevement_ext.launch import child, supervisor, worker
from moevement_ext.launch.launcher_events import WorkerLate, WorkerLaunched, WorkerUnkillable
from moevement_ext.launch.worker import Worker
from tests.support.readable import dies
from tests.unit.launch.conftest import Job, ended, failure, unkillable

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


def report_joining(job: Job, *attempts: tuple[int, int]) -> None:
    def note(event: Event) -> None:
        if isinstance(event, WorkerLaunched) and (event.rank, event.restarts) in attempts:
            job.mailbox.set(f'joining/{event.rank}', str(job.process(event.rank)))

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


@pytest.mark.parametrize('survive', [True, False])
def test_user_error_at_the_start_ends_the_job(job: Job, survive: bool) -> None:
    job.finish_when = lambda: False
    again = [f'1.{attempt}=exit:{EXIT_USER_ERROR}' for attempt in range(3)]
    flags = ('1.0=print:no such flag', *again)
    assert job.run(*flags, survive=survive, nodes=2) == EXIT_USER_ERROR
    first, *lines = failure(job).splitlines()
    assert first.startswith('rank 1 ') and 'refuses what it was started with' in first
    assert lines[-1] == '    no such flag'
    assert len(job.started()) == 2


def test_user_error_of_a_replacement_does_not_end_the_job(job: Job) -> None:
    job.finish_when = lambda: len(job.started(1)) == 3
    assert job.run('1.0=kill', f'1.1=exit:{EXIT_USER_ERROR}', nodes=2) == 0
    assert len(job.started(0)) == 1


@pytest.mark.parametrize('survive', [True, False])
def test_other_bits_of_a_recovery_end_the_job(job: Job, survive: bool) -> None:
    """A replacement, as here, would begin the same replay."""
    job.finish_when = lambda: False
    flags = ('1.0=kill', f'1.1=exit:{EXIT_OTHER_BITS}')
    assert job.run(*flags, survive=survive, nodes=2) == EXIT_OTHER_BITS
    assert 'a recovery computed other bits' in failure(job)
    assert len(job.started(1)) == 2


def test_loss_of_all_ranks_is_one_restart_of_each(job: Job) -> None:
    job.finish_when = lambda: len(job.started()) == 6
    flags = [f'{rank}.0=exit:{EXIT_WHOLE_JOB}' for rank in range(3)]
    assert job.run(*flags, nodes=3, max_restarts=1) == 0


def test_wait_for_the_death_of_a_worker_is_bounded(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, 'TO_DIE_S', 1.0)

    def kill(event: WorkerLaunched) -> None:
        hold(event.pid)
        os.kill(event.pid, signal.SIGKILL)  # as its watchdog does

    job.on(WorkerLaunched, kill, rank=1)
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


@pytest.mark.parametrize(
    ('flags', 'number'),
    [
        ('--exit-signal-handler', signal.SIGTERM),
        ('--exit-signal-handler --exit-signal SIGUSR1', signal.SIGUSR1),
        ('--exit-signal=SIGUSR2 --exit-signal-handler', signal.SIGUSR2),
        ('--exit-signal SIGUSR1', signal.SIGTERM),
        ('--exit-signal-handler --exit-signal SIGNOTHING', signal.SIGTERM),
    ],
)
def test_stop_sends_the_exit_signal_of_the_workers(
    job: Job, flags: str, number: signal.Signals
) -> None:
    job.on_event = lambda event: job.running.stop(143) if len(job.started()) == 2 else None
    job.finish_when = lambda: False
    assert job.run(*flags.split(), nodes=2) == 143
    assert ended(job) == {0: [-number], 1: [-number]}
