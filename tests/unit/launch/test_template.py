# SPDX-License-Identifier: Apache-2.0
"""Forked workers behave like workers started as separate processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from moevement_ext.launch.template import Template
from moevement_ext.memory.limits import SPARES
from tests.support.readable import readable
from tests.unit.launch.conftest import Job

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


def test_forked_worker_has_the_environment_of_a_spawned_one(job: Job) -> None:
    default = "import os\nos.environ.setdefault('OF_THE_PROGRAM', '1')\n"
    job.program.write_text(default + job.program.read_text())
    assert job.run() == 0
    spawned = job.attempt(0)['env']
    (job.folder / 'finish').unlink()
    assert job.run(spares=1) == 0
    of_this_job = {
        SPARES,
        *('MASTER_PORT', 'MOEVEMENT_RUN', 'TORCHELASTIC_RUN_ID'),
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
