# SPDX-License-Identifier: Apache-2.0
"""Forked workers behave like workers started as separate processes."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.launch.child import SpawnedChild
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.launcher_events import WorkerLaunched
from moevement_ext.launch.template import Template
from tests.support.readable import dies, readable
from tests.unit.launch.conftest import Job, ended

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


def test_program_is_imported_once_for_all_attempts(job: Job, tmp_path: Path) -> None:
    job.finish_when = lambda: len(job.started(1)) == 2
    assert job.run('1.0=kill', nodes=2, fork=True) == 0
    attempts = [job.attempt(0), job.attempt(1), job.attempt(1, 1)]
    [template] = {attempt['imported']['pid'] for attempt in attempts}
    assert template not in {event.pid for event in job.started()}
    assert [attempt['imported']['rank'] for attempt in attempts] == [None] * 3
    assert [attempt['argv'] for attempt in attempts] == [[str(job.program), '1.0=kill']] * 3


def test_forked_worker_has_the_environment_of_a_spawned_one(job: Job) -> None:
    default = "import os\nos.environ.setdefault('OF_THE_PROGRAM', '1')\n"
    job.program.write_text(default + job.program.read_text())
    assert job.run() == 0
    spawned = job.attempt(0)['env']
    (job.folder / 'finish').unlink()
    assert job.run(fork=True) == 0
    of_this_job = {
        *('MASTER_PORT', 'MOEVEMENT_RUN', 'TORCHELASTIC_RUN_ID'),
        *('MOEVEMENT_LAUNCH', 'MOEVEMENT_PROCESS', 'MOEVEMENT_SECRET'),
    }
    forked = job.attempt(0)['env']
    assert spawned.keys() == forked.keys() >= {'OF_THE_PROGRAM'}
    assert {name for name in forked if forked[name] != spawned[name]} <= of_this_job


def test_large_environment_reaches_the_worker(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than Linux accepts in one message."""
    large = {f'LARGE_{number}': '.' * 100_000 for number in range(10)}
    for name, value in large.items():
        monkeypatch.setenv(name, value)
    assert job.run(fork=True) == 0
    assert job.attempt(0)['env'].items() >= large.items()


def test_child_spawned_by_a_worker_imports_the_program_as_main(job: Job, tmp_path: Path) -> None:
    assert job.run('0.0=spawn:child', fork=True, log_dir=tmp_path / 'logs') == 0
    assert (tmp_path / 'logs' / 'rank0.log').read_text() == 'importing\nchild\n'


def test_workers_outlive_their_template(job: Job) -> None:
    """Workers that start later import the program themselves."""

    def kill_template(event: WorkerLaunched) -> None:
        workers = {event.pid for event in job.started()}
        ours = [one for one in psutil.Process().children() if str(job.program) in one.cmdline()]
        [template] = [one for one in ours if one.pid not in workers]
        template.kill()
        assert dies(template.pid)
        job.touch('strike')

    job.on(WorkerLaunched, kill_template, rank=1, restarts=0)
    job.finish_when = lambda: len(job.started(1)) == 2
    assert job.run('1.0=kill:strike', nodes=2, fork=True) == 0
    assert ended(job) == {0: [0], 1: [-9, 0]}
    assert job.attempt(1, 1)['imported']['pid'] == job.started(1)[1].pid


@pytest.fixture
def nowhere() -> Iterator[BinaryIO]:
    with open(os.devnull, 'wb') as output:
        yield output


def test_unimportable_program_ends_the_job(job: Job) -> None:
    job.program.write_text('raise SystemExit(5)')
    assert job.run(fork=True) == 1


def test_spares_with_fork_are_refused(job: Job) -> None:
    with pytest.raises(ConfigurationError, match='--spares 1 --fork: .* leave out --spares'):
        LaunchConfig(str(job.program), spares=1, fork=True)


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


def test_worker_whose_end_cannot_be_seen_is_killed(
    job: Job, nowhere: BinaryIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on beside the worker that takes its place."""
    begun: list[int] = []

    def no_file_left(pid: int) -> int:
        begun.append(pid)
        raise OSError(errno.EMFILE, 'Too many open files')

    own = {**os.environ, 'RANK': '0', 'TORCHELASTIC_RESTART_COUNT': '0'}
    template = Template.spawn(str(job.program), [], os.environ)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, 'pidfd_open', no_file_left)
            with pytest.raises(OSError, match='open files'):
                template.start([str(job.program)], own, nowhere)
            with pytest.raises(OSError, match='open files'):
                SpawnedChild([str(job.program)], own, None)
        assert [psutil.pid_exists(pid) for pid in begun] == [False, False]
    finally:
        template.close()
