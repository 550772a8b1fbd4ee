# SPDX-License-Identifier: Apache-2.0
"""Hot spares, and the workers that are forked from them, which behave like new processes."""

import errno
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from moevement_ext.launch import spare, template
from moevement_ext.launch.launcher_events import SpareEnded, SpareReady, WorkerEnded, WorkerLaunched
from moevement_ext.launch.machine import Machine
from moevement_ext.launch.template import Template
from moevement_ext.memory.limits import SPARES
from tests.support.readable import readable
from tests.unit.launch.conftest import Job, ended, starts_a_thread

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


FAILS_ONCE = """
import os, pathlib, sys, time
met = pathlib.Path(sys.argv[0]).parent / 'met'
if 'RANK' not in os.environ and not met.exists():
    met.touch()
    os.kill(os.getpid(), 9)
"""
"""Beginning of a program: the import of the first spare fails."""

GUARDED = """
import pickle


class Sampled:
    pass


if __name__ == '__main__':
    imported['main'] = [__name__, __file__, Sampled.__module__, sys.path]
    imported['unpickled'] = type(pickle.loads(pickle.dumps(Sampled()))) is Sampled
    main()
    sys.exit(7)
"""
"""End of a program that does more under its main guard than call `main()`."""


@pytest.mark.parametrize('forks', [True, False])
@pytest.mark.parametrize('logged', [True, False])
def test_ready_spare_takes_over(
    job: Job, forks: bool, logged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not forks:
        starts_a_thread(job)
    replaces, spares = (1, 1) if forks else (2, 3)  # the first one has become rank 0
    job.on(SpareReady, lambda event: job.touch('ready'), nth=replaces)
    job.finish_when = lambda: len(job.spares()) == spares and len(job.started(1)) == 2
    log_dir = tmp_path / 'logs' if logged else None
    flags = ('1.0=kill:ready', '1.1=print:second')
    assert job.run(*flags, nodes=2, spares=1, log_dir=log_dir) == 0

    spare, worker = job.spares()[replaces - 1].pid, job.started(1)[1]
    assert {event.forks for event in job.spares()} == {forks}
    assert [event.was_spare for event in job.started() if event.restarts == 0] == [True, forks]
    assert worker == WorkerLaunched(1, worker.pid, 1, was_spare=True)
    assert (worker.pid == spare) is not forks
    first, second = job.attempt(1, 0), job.attempt(1, 1)
    assert second['imported'] == {'pid': spare, 'rank': None, 'path': str(tmp_path)}
    assert second['argv'] == first['argv']
    assert first['env'].keys() == second['env'].keys()
    differing = {'TORCHELASTIC_RESTART_COUNT', 'MOEVEMENT_PROCESS'}
    found = {k for k in first['env'] if second['env'].get(k) != first['env'][k]}
    assert found - {'MOEVEMENT_DEATH_NOTICE'} == differing  # perhaps the same descriptor
    if logged:
        own = '' if forks else 'importing\n'
        assert (tmp_path / 'logs' / 'rank1.log').read_text() == f'{own}second\n'
        assert (tmp_path / 'logs' / 'spares.log').read_text() == 'importing\n' * spares
    else:
        assert '[rank 1] second\n' in capsys.readouterr().out
    assert job.seen(SpareEnded) == []


@pytest.mark.parametrize('survive', [True, False])
def test_one_spare_forks_all_workers(job: Job, survive: bool) -> None:
    job.finish_when = lambda: all(len(job.started(rank)) == 3 for rank in (0, 1))
    flags = [f'{rank}.{attempt}=kill' for rank in (0, 1) for attempt in (0, 1)]
    flags = flags if survive else flags[2:]
    assert job.run(*flags, survive=survive, nodes=2, spares=2) == 0
    [spare] = job.spares()
    assert {event.was_spare for event in job.started()} == {True}
    lives = [(rank, restarts) for rank in (0, 1) for restarts in range(3)]
    # If all start again, rank 0 may end before it has written its file.
    seen = [job.attempt(*life) for life in lives if survive or life not in [(0, 0), (0, 1)]]
    assert {one['imported']['pid'] for one in seen} == {spare.pid}
    assert {one['imported']['rank'] for one in seen} == {None}
    assert all(one['argv'] == [str(job.program), *flags] for one in seen)


def test_workers_outlive_the_spare_that_forked_them(job: Job) -> None:
    job.on(WorkerLaunched, lambda event: os.kill(job.spares()[0].pid, signal.SIGKILL))
    job.finish_when = lambda: len(job.spares()) == 2
    assert job.run(spares=1) == 0
    assert [event.code for event in job.seen(SpareEnded)] == [-9]
    assert ended(job) == {0: [0]}


@pytest.mark.parametrize('forks', [True, False])
def test_worker_of_a_spare_is_as_a_new_process(job: Job, forks: bool) -> None:
    program, guard = job.program.read_text().split("\nif __name__ == '__main__'")
    job.program.write_text(program + GUARDED)
    if not forks:
        starts_a_thread(job)
    imported = []
    for spares in (0, 1):
        assert job.run(spares=spares, max_restarts=0) == 1
        imported.append(job.attempt(0)['imported'])
    assert [event.was_spare for event in job.started()] == [False, True]
    assert ended(job) == {0: [7, 7]}
    first, second = imported
    assert first['main'][0] == '__main__' and first['unpickled']
    assert [second[key] for key in ('main', 'unpickled')] == [first['main'], True]


@pytest.mark.parametrize('step', ['_new_worker', '_opened'])
def test_worker_is_started_once_there_is_room(
    step: str, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start, refused = getattr(Machine, step), []

    def without_room(machine: Machine, *given: object) -> object:
        if job.started() and len(refused) < 5:  # more than the errors that end a job
            refused.append(given)
            raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')
        return start(machine, *given)

    monkeypatch.setattr(Machine, step, without_room)
    job.finish_when = lambda: len(job.started(0)) == 2
    assert job.run('0.0=kill', log_dir=tmp_path / 'logs') == 0
    assert len(refused) == 5
    assert [event.restarts for event in job.started(0)] == [0, 1]


def test_unresponsive_spare_is_killed_and_the_worker_starts_without_it(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, '_TO_ANSWER_S', 0.2)

    job.on(SpareReady, lambda event: os.kill(event.pid, signal.SIGSTOP), nth=1)
    job.finish_when = lambda: len(job.spares()) == 2
    assert job.run(spares=1) == 0
    assert not job.started(0)[0].was_spare
    assert [event.code for event in job.seen(SpareEnded)] == [-9]


def test_warm_up_of_a_spare_is_inherited_by_its_worker(job: Job, tmp_path: Path) -> None:
    job.program.write_text(
        "def warm_up(flags):\n    imported['warm'] = list(flags)\n" + job.program.read_text()
    )
    assert job.run('x', spares=1) == 0
    assert job.attempt(0)['imported']['warm'] == ['x']


def test_no_worker_waits_for_a_spare_after_a_failed_import(job: Job) -> None:
    job.program.write_text(
        FAILS_ONCE + 'while "RANK" not in os.environ: time.sleep(0.01)\n' + job.program.read_text()
    )
    job.finish_when = lambda: len(job.started(0)) == 2
    assert job.run('0.0=kill', spares=1) == 0
    assert [event.was_spare for event in job.started()] == [False, False]


def test_job_ends_while_its_workers_wait_for_the_import(job: Job) -> None:
    job.program.write_text(
        'import pathlib, sys, time\n'
        'pathlib.Path(sys.argv[0]).with_name("began").touch()\n'
        'time.sleep(1000)\n' + job.program.read_text()
    )
    supervisor = job.supervisor(spares=1, nodes=2, grace_s=1000.0)

    def end() -> None:
        while not (job.folder / 'began').exists():
            time.sleep(0.01)
        supervisor.stop(143)

    threading.Thread(target=end, daemon=True).start()
    assert supervisor.run() == 143
    assert ended(job) == {0: [-signal.SIGTERM], 1: [-signal.SIGTERM]}
    assert str(job.seen(WorkerEnded)[0]) == 'rank 0 (not started yet) was killed by SIGTERM'


def test_spare_that_cannot_start_is_not_retried(job: Job, tmp_path: Path) -> None:
    job.program.write_text(job.program.read_text().replace('MOEVEMENT_SPARES', 'SPARES'))
    job.finish_when = lambda: bool(job.seen(SpareEnded))
    assert job.run(spares=1, log_dir=tmp_path) == 0
    (gone,) = job.seen(SpareEnded)
    assert (gone.code, gone.was_ready) == (1, False)
    assert 'program.py does not declare MOEVEMENT_SPARES = True, which --spares needs' in (
        (tmp_path / 'spares.log').read_text()
    )


def test_spare_that_could_not_start_is_retried_after_the_loss_of_a_worker(job: Job) -> None:
    """A job of weeks is not left without spares since a moment without memory."""
    job.program.write_text(FAILS_ONCE + job.program.read_text())
    job.finish_when = lambda: len(job.started(0)) == 2 and bool(job.spares())
    assert job.run('0.0=kill', spares=1) == 0
    assert [event.was_ready for event in job.seen(SpareEnded)] == [False]


@pytest.mark.parametrize(('result', 'forks'), [(3, True), (0, False)])
def test_program_that_has_used_a_gpu_is_not_forked(
    result: int, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(cuDeviceGetCount=lambda _: result)
    monkeypatch.setattr(spare.ctypes, 'CDLL', lambda name: driver)
    monkeypatch.setattr(spare.os, 'listdir', lambda path: ['1'])
    maps = io.StringIO('7f00-7f01 r-xp 0 0 0 /usr/lib/libcuda.so.550.54\n')
    monkeypatch.setattr(spare, 'open', lambda path: maps, raising=False)
    assert spare.can_fork() is forks


def test_forked_worker_has_the_environment_of_a_spawned_one(job: Job) -> None:
    default = "import os\nos.environ.setdefault('OF_THE_PROGRAM', '1')\n"
    job.program.write_text(default + job.program.read_text())
    assert job.run() == 0
    spawned = job.attempt(0)['env']
    (job.folder / 'finish').unlink()
    assert job.run(spares=1) == 0
    of_this_job = {
        SPARES,
        *('MASTER_PORT', 'MOEVEMENT_RUN', 'MOEVEMENT_COORDINATOR', 'TORCHELASTIC_RUN_ID'),
        *('MOEVEMENT_LAUNCH', 'MOEVEMENT_PROCESS', 'MOEVEMENT_SECRET', 'MOEVEMENT_DEATH_NOTICE'),
    }
    forked = job.attempt(0)['env']
    assert spawned.keys() == forked.keys() >= {'OF_THE_PROGRAM'}
    assert {name for name in forked if forked[name] != spawned[name]} <= of_this_job


def test_child_spawned_by_a_worker_imports_the_program_as_main(job: Job, tmp_path: Path) -> None:
    assert job.run('0.0=spawn:child', spares=1, log_dir=tmp_path / 'logs') == 0
    assert (tmp_path / 'logs' / 'rank0.log').read_text() == 'importing\nchild\n'


@pytest.fixture
def nowhere() -> Iterator[BinaryIO]:
    with open(os.devnull, 'wb') as output:
        yield output


def test_worker_killed_right_after_its_fork_dies(job: Job, nowhere: BinaryIO) -> None:
    """It does not lead a process group yet that could be killed."""
    template = Template.spawn(str(job.program), [], os.environ)
    try:
        for attempt in range(20):
            own = {'RANK': '0', 'TORCHELASTIC_RESTART_COUNT': str(attempt)}
            worker = template.start([str(job.program)], {**os.environ, **own}, nowhere)
            worker.signal(signal.SIGKILL)
            assert readable(worker.death, 120.0)
            assert worker.reap() == -signal.SIGKILL
    finally:
        template.close()
