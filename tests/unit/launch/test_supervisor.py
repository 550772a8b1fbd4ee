# SPDX-License-Identifier: Apache-2.0
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event
from moevement_ext.launch import machine
from moevement_ext.launch.launcher_events import (
    AllStartAgain,
    MemoryKept,
    WorkerEnded,
    WorkerLaunched,
    WorkerStopped,
)
from moevement_ext.membership import counters
from moevement_ext.membership.mailbox import write_memory
from moevement_ext.membership.rendezvous import how_broken, is_over, present_round
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.system.death_notice import signal_that_kills
from tests.support.readable import dies, readable
from tests.unit.launch.conftest import Job, ended, failure, unkillable
from tests.unit.store.processes import until

ROUNDS = 10
"""Of the launcher, within which it would start a replacement."""

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


# Replacement


@pytest.mark.parametrize(('action', 'code'), [('kill', -9), ('exit:3', 3)])
def test_only_the_dead_worker_is_replaced(job: Job, action: str, code: int, tmp_path: Path) -> None:
    job.finish_when = lambda: len(job.started(1)) == 3
    flags = (f'1.0={action}', f'1.1={action}')
    assert job.run(*flags, nodes=3, log_dir=tmp_path / 'logs') == 0
    assert ended(job) == {0: [0], 1: [code, code, 0], 2: [0]}
    attempts = job.started(1)
    assert [attempt.restarts for attempt in attempts] == [0, 1, 2]
    assert len({attempt.pid for attempt in attempts}) == 3
    imported = [job.attempt(1, restarts)['imported']['pid'] for restarts in range(3)]
    assert imported == [attempt.pid for attempt in attempts]


def test_death_is_announced_before_the_rank_is_replaced(job: Job) -> None:
    announced = []

    def note(event: WorkerLaunched) -> None:
        announced.append(how_broken(job.running.store, 0).reason)

    job.on(WorkerLaunched, note, restarts=1)
    job.finish_when = lambda: len(job.started(1)) == 2
    launcher = job.supervisor('1.0=kill', nodes=2)
    counters.sign(launcher.store, 'here/0', 1, 2)  # the worker took part in this round
    assert launcher.run() == 0
    pid = job.started(1)[0].pid
    assert announced == [f'rank 1 (pid {pid}) was killed by SIGKILL']
    assert present_round(launcher.store) == 1


@pytest.mark.parametrize('spares', [0, 1])
def test_death_is_announced_before_the_memory_is_freed(
    spares: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that stops in its exit keeps the memory, as the kernel does for seconds."""
    thread, seen = job.folder / 'thread', []
    looked: list[int] = []

    def look(pid: int) -> int:
        looked.append(pid)
        return signal_that_kills(pid)

    monkeypatch.setattr(machine, 'signal_that_kills', look)

    def kill() -> None:
        until(thread.exists)
        release, pid = hold(int(thread.read_text())), job.started(1)[0].pid
        alive = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_over(launcher.store, 0))
        found = how_broken(launcher.store, 0).reason
        looked.clear()
        until(lambda: len(looked) >= ROUNDS)
        seen.append({*looked} == {job.started(0)[0].pid})
        seen.extend([found == f'rank 1 (pid {pid}) was killed by SIGKILL', readable(alive, 0.0)])
        seen.append(len(job.started(1)))
        os.close(alive)
        release()

    job.finish_when = lambda: len(job.started(1)) == 2
    launcher = job.supervisor('1.0=notice', nodes=2, spares=spares)
    counters.sign(launcher.store, 'here/0', 1, 2)  # the worker took part in this round
    with unkillable() as hold:
        threading.Thread(target=kill, daemon=True).start()
        assert launcher.run() == 0
    assert seen == [True, True, False, 1]
    assert ended(job) == {0: [0], 1: [-signal.SIGKILL, 0]}


@pytest.mark.parametrize('spares', [0, 1])
def test_children_of_a_dead_worker_die_with_it(job: Job, spares: int) -> None:
    job.finish_when = lambda: len(job.started(0)) == 2
    assert job.run('0.0=child', '0.0=kill', spares=spares) == 0
    assert dies(job.attempt(0)['child'])


# Restart of all workers: the program has not reported that its workers survive


def test_workers_that_cannot_survive_start_again_together(job: Job) -> None:
    """All workers of an attempt have the same restart count, as `torch.distributed` requires."""
    job.finish_when = lambda: len(job.started()) == 9
    flags = ('1.0=kill', '2.1=exit:3')
    assert job.run(*flags, survive=False, nodes=3) == 0
    assert ended(job) == {0: [0], 1: [-9, 0], 2: [3, 0]}
    stopped = [(e.rank, e.pid) for e in job.seen(WorkerStopped)]
    attempts = [
        (rank, job.started(rank)[attempt].pid) for rank, attempt in ((0, 0), (2, 0), (0, 1), (1, 1))
    ]
    assert stopped == attempts
    assert [attempt.restarts for attempt in job.started()] == [0] * 3 + [1] * 3 + [2] * 3
    reasons = [event.reason for event in job.seen(AllStartAgain)]
    pid = job.started(2)[1].pid
    assert reasons[1] == f'rank 2 (pid {pid}) ended with exit status 3'


def test_errors_caused_by_a_lost_worker_are_not_program_failures(job: Job) -> None:
    """They may be detected before the loss, for example that of a node."""

    def kill_the_other(event: WorkerEnded) -> None:
        os.kill(job.started(0)[-1].pid, signal.SIGKILL)
        assert dies(job.started(0)[-1].pid)

    job.on(WorkerLaunched, lambda event: job.touch(f'fail-{event.restarts}'), rank=1)
    job.on(WorkerEnded, kill_the_other, code=3)
    job.finish_when = lambda: len(job.started()) == 8
    flags = [f'1.{attempt}=exit:3:fail-{attempt}' for attempt in range(3)]
    assert job.run(*flags, survive=False, nodes=2) == 0
    assert ended(job) == {0: [-9, -9, -9, 0], 1: [3, 3, 3, 0]}


def test_restart_of_all_workers_counts_once(job: Job) -> None:
    job.finish_when = lambda: False
    flags = ('1.0=kill', '0.1=kill', '1.2=kill')
    assert job.run(*flags, survive=False, nodes=2, max_restarts=2) == 1
    assert failure(job).endswith('and --max-restarts 2 is used up.')
    assert len(job.started()) == 6


@pytest.mark.parametrize('logged', [True, False])
def test_program_failing_at_start_ends_the_job_with_its_last_lines(
    job: Job, logged: bool, tmp_path: Path
) -> None:
    job.finish_when = lambda: False
    failing = [f'{rank}.{attempt}=exit:3' for rank in range(2) for attempt in range(9)]
    printing = [f'{rank}.{attempt}=print:no such flag' for rank in range(2) for attempt in range(9)]
    log_dir = tmp_path / 'logs' if logged else None
    assert job.run(*printing, *failing, survive=False, nodes=2, log_dir=log_dir) == 1
    first, *lines = failure(job).splitlines()
    assert first.endswith('within 10 minutes; its last lines:')
    assert 'it failed by itself 3 times' in first or 'by themselves 3 times in all' in first
    assert lines[-1] == '    no such flag'
    assert len(job.started()) == 6


def test_errors_of_different_ranks_do_not_count_together(job: Job) -> None:
    job.finish_when = lambda: len(job.started()) == 7
    flags = [*(f'0.{attempt}=exit:3' for attempt in range(2)), '1.0=exit:3', '2.0=exit:3']
    assert job.run(*flags, nodes=3) == 0


# End of the job


@pytest.mark.parametrize('survive', [True, False])
@pytest.mark.parametrize('last', [True, False])
def test_rank_killed_at_its_exit_fails_the_job(job: Job, last: bool, survive: bool) -> None:
    """Before or after the others have ended; it is not replaced."""

    def note(event: Event) -> None:
        if isinstance(event, WorkerLaunched):
            job.mailbox.set(f'finished/{event.rank}', f'{job.process(event.rank)} 0')
            if event.rank == 2:
                (job.folder / ('others' if last else 'abort')).touch()
        if isinstance(event, WorkerEnded) and len(ended(job)) == (2 if last else 1):
            (job.folder / ('abort' if last else 'others')).touch()

    job.on_event = note
    job.finish_when = lambda: False
    flags = ('0.0=exit:0:others', '1.0=kill:abort', '2.0=exit:0:others')
    assert job.run(*flags, survive=survive, nodes=3) == 1
    assert ended(job) == {0: [0], 1: [-9], 2: [0]}
    assert 'was killed by SIGKILL when it had finished' in failure(job)


def test_error_after_training_fails_the_job(job: Job) -> None:
    def note(event: WorkerLaunched) -> None:
        job.mailbox.set(f'finished/{event.rank}', f'{job.process(event.rank)} 0')

    job.on(WorkerLaunched, note)
    assert job.run('0.0=print:cannot close', '0.0=exit:1:finish', nodes=2) == 1
    reason, *lines = failure(job).splitlines()
    assert reason.endswith('ended with exit status 1 when it had finished; its last lines:')
    assert lines[-1] == '    cannot close'
    assert len(job.started()) == 2


def test_rank_killed_after_training_restarts_all(job: Job) -> None:
    def note(event: WorkerLaunched) -> None:
        if event.rank == 1 and event.restarts == 0:
            job.mailbox.delete_key('survivors')
            job.touch('die')

    job.on(WorkerLaunched, note)
    job.finish_when = lambda: len(job.started()) == 4
    assert job.run('1.0=kill:die', nodes=2) == 0
    assert ended(job) == {0: [0], 1: [-9, 0]} and len(job.seen(WorkerStopped)) == 1


@pytest.mark.parametrize('said', [True, False])
def test_failing_job_waits_for_finished_workers(job: Job, said: bool) -> None:
    """They free their memory, or finish writing."""

    def finish(event: WorkerLaunched) -> None:
        for worker in job.started()[not said :]:
            job.mailbox.set(f'finished/{worker.rank}', f'{job.process(worker.rank)} 0')
        job.touch('fail')

    job.on(WorkerLaunched, finish, rank=1)
    job.on(WorkerEnded, lambda event: job.finish(), rank=0)
    job.finish_when = lambda: False
    assert job.run('0.0=exit:3:fail', nodes=2, grace_s=60.0) == 1
    assert ended(job) == {0: [3], 1: [0]}
    assert f'rank 0 (pid {job.started(0)[0].pid}) ended with exit status 3' in failure(job)


@pytest.mark.parametrize('finished_first', [True, False])
def test_no_restart_once_a_peer_has_reported_its_end(job: Job, finished_first: bool) -> None:
    job.finish_when = lambda: False

    def finish(event: WorkerLaunched) -> None:
        job.mailbox.set('finished/0', f'{job.process(0)} 0')
        job.touch('end' if finished_first else 'die')

    job.on(WorkerLaunched, finish, rank=1)
    job.on(WorkerEnded, lambda event: job.touch('die'))
    flags = ('0.0=exit:0:end', '1.0=kill:die')
    assert job.run(*flags, survive=False, nodes=2, grace_s=0.2) == 1
    assert 'rank 0 had already finished' in failure(job)
    assert ended(job) == {0: [0 if finished_first else -9], 1: [-9]}


@pytest.mark.parametrize('file', ['window-4-plan.window', 'free-0.window', None])
def test_what_remains_of_a_job_is_reported(
    job: Job, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without a complete window has nothing to go on from."""
    monkeypatch.setenv('SLURM_JOB_ID', '42')
    memory = tmp_path / 'memory' / 'run'
    if file is not None:
        (memory / 'node0' / '0' / '0').mkdir(parents=True)
        (memory / 'node0' / '0' / '0' / file).touch()
    job.on_event = lambda event: job.running.stop(143) if job.started() else None
    launcher = job.supervisor()
    write_memory(job.mailbox, memory)
    assert launcher.run() == 143
    said = job.seen(MemoryKept)
    assert said == ([MemoryKept(str(memory), 'slurm-42')] if file == 'window-4-plan.window' else [])


def test_windows_of_a_running_job_of_the_same_name_are_not_reported(
    job: Job, tmp_path: Path
) -> None:
    """The advice to remove them would end that job."""
    store = NodeStore(tmp_path, 'run', 'node0')
    store.lock(0)
    store.owner_path(0, 0).mkdir()
    (store.owner_path(0, 0) / 'window-4-plan.window').touch()
    job.on_event = lambda event: job.running.stop(143) if job.started() else None
    launcher = job.supervisor()
    write_memory(job.mailbox, store.path.parent)
    assert launcher.run() == 143
    assert job.seen(MemoryKept) == []
    store.close()


def test_exhausted_restart_budget_ends_the_job(job: Job) -> None:
    job.finish_when = lambda: False
    flags = ('1.0=kill', '1.1=exit:5')
    before = psutil.Process().children()
    assert job.run(*flags, nodes=2, spares=1, max_restarts=1) == 1
    assert 'rank 1' in failure(job)
    assert failure(job).endswith('ended with exit status 5 and --max-restarts 1 is used up.')
    assert ended(job) == {0: [-9], 1: [-9, 5]}
    assert psutil.Process().children() == before


def test_repeated_program_failures_end_the_job(job: Job) -> None:
    job.finish_when = lambda: False
    flags = ('0.0=kill', *(f'0.{attempt}=exit:3' for attempt in range(1, 9)))
    assert job.run(*flags, nodes=2) == 1
    assert 'rank 0' in failure(job)
    assert 'ended with exit status 3; it failed by itself 3 times' in failure(job)
    assert failure(job).splitlines()[-1] == '    importing'
    assert ended(job) == {0: [-9, 3, 3, 3], 1: [-9]}


def test_whole_job_exit_is_no_program_failure(job: Job) -> None:
    job.finish_when = lambda: len(job.started(0)) == 6
    flags = tuple(f'0.{attempt}=exit:{EXIT_WHOLE_JOB}' for attempt in range(5))
    assert job.run(*flags, nodes=1) == 0


def test_stop_sends_the_signal_first_even_to_stopped_workers(job: Job) -> None:
    job.on_event = lambda event: stop(job) if len(job.started()) == 2 else None
    job.finish_when = lambda: False

    def stop(job: Job) -> None:
        if not ended(job):
            os.kill(job.running.workers[0].pid, signal.SIGSTOP)
            job.running.stop(143)

    assert job.run(nodes=2) == 143
    assert ended(job) == {0: [-15], 1: [-15]}
