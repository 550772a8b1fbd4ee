# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext.events import Event
from moevement_ext.launch import spare
from moevement_ext.launch.launcher_events import (
    SpareEnded,
    SpareMissing,
    SpareReady,
    WorkerLaunched,
)
from tests.unit.launch.conftest import Job

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


def spares_ended(job: Job) -> list[SpareEnded]:
    return [event for event in job.events if isinstance(event, SpareEnded)]


@pytest.mark.parametrize('logged', [True, False])
def test_ready_spare_takes_over(
    job: Job, logged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill_when_ready(event: Event) -> None:
        if isinstance(event, SpareReady) and len(job.spares()) == 1:
            (tmp_path / 'ready').touch()

    job.on_event = kill_when_ready
    job.finish_when = lambda: len(job.spares()) == 2  # another one was started
    log_dir = tmp_path / 'logs' if logged else None
    flags = ('1.0=kill:ready', '1.1=print:second')
    assert job.run(*flags, nodes=2, spares=1, log_dir=log_dir) == 0

    taken = job.spares()[0].pid
    assert job.started(1)[1] == WorkerLaunched(1, taken, 1, was_spare=True)
    first, second = job.life(1, 0), job.life(1, 1)
    assert second['imported'] == {'pid': taken, 'rank': None, 'path': str(tmp_path)}
    assert second['argv'] == first['argv']
    differing = {'TORCHELASTIC_RESTART_COUNT'}
    assert {k for k in first['env'] if second['env'].get(k) != first['env'][k]} == differing
    if logged:
        assert (tmp_path / 'logs' / 'rank1.log').read_text() == 'importing\nsecond\n'
        assert (tmp_path / 'logs' / 'spares.log').read_text() == 'importing\n' * 2
    else:
        assert '[rank 1] second\n' in capsys.readouterr().out
    assert spares_ended(job) == []


def test_worker_is_replaced_without_waiting_for_a_spare(job: Job) -> None:
    job.program.write_text(
        'import os, pathlib, time\n'
        'while "RANK" not in os.environ: time.sleep(0.01)  # a spare never gets further\n'
        + job.program.read_text()
    )
    job.finish_when = lambda: len(job.started(0)) == 2
    assert job.run('0.0=kill', spares=1) == 0
    assert [event.was_spare for event in job.started()] == [False, False]


def test_ready_spare_that_dies_is_replaced(job: Job) -> None:
    def kill_first(event: Event) -> None:
        if isinstance(event, SpareReady) and len(job.spares()) == 1:
            os.kill(event.pid, signal.SIGKILL)

    job.on_event = kill_first
    job.finish_when = lambda: len(job.spares()) == 2
    assert job.run(spares=1) == 0
    assert spares_ended(job) == [SpareEnded(job.spares()[0].pid, -9, was_ready=True)]


def test_spare_that_cannot_start_is_not_tried_again(job: Job, tmp_path: Path) -> None:
    job.program.write_text(job.program.read_text().replace('main()', 'run()'))
    job.finish_when = lambda: bool(spares_ended(job))
    assert job.run(spares=1, log_dir=tmp_path) == 0
    (gone,) = spares_ended(job)
    assert (gone.code, gone.was_ready) == (1, False)
    assert 'program.py has no function main(), which --spares needs' in (
        (tmp_path / 'spares.log').read_text()
    )


def test_a_spare_for_which_nothing_is_left_ends_no_worker(job: Job, tmp_path: Path) -> None:
    """Here its log cannot be opened any more; it may as well be the last process or file."""
    log_dir = tmp_path / 'logs'

    def remove_then_kill(event: Event) -> None:
        if isinstance(event, SpareReady):
            shutil.rmtree(log_dir)
            os.kill(event.pid, signal.SIGKILL)

    job.on_event = remove_then_kill
    job.finish_when = lambda: any(isinstance(event, SpareMissing) for event in job.events)
    assert job.run(spares=1, log_dir=log_dir) == 0
    assert len(job.started()) == 1
    assert 'No such file or directory' in str(job.events)


def test_spare_ends_with_its_stdin(job: Job) -> None:
    command = [sys.executable, spare.__file__, str(job.program)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b'.', b'importing\n')
