# SPDX-License-Identifier: Apache-2.0
"""A job is hurt in the ways that it says; real processes that train nothing."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tools.lab.errors import LabError
from tools.lab.job import Job, Kind
from tools.lab.launch import Launch

pytestmark = pytest.mark.timed
WAIT_S = 120.0
"""At most for something that comes at once."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Two workers on each of two nodes, of which the first has memory."""
    program = tmp_path / 'program.py'
    program.write_text('import time\ntime.sleep(600)\n')
    window = tmp_path / 'memory' / 'node0' / '0' / 'a.window'
    window.parent.mkdir(parents=True)
    window.write_bytes(bytes(100))
    launch = Launch(tmp_path / 'job', [], 2, 2, max_restarts=9, program_file=str(program))
    with Job(launch, memory=tmp_path / 'memory') as job:
        yield job


def test_faults_of_each_kind_are_injected(job: Job, tmp_path: Path) -> None:
    workers = [psutil.Process(pid) for pid in job.pids()]
    for kind, why in ((Kind.NODE, 'node1 has no memory to lose'), (Kind.AGENT, 'only a job under')):
        with pytest.raises(LabError, match=why):
            job.hurt(kind, [2])
    assert workers[2].status() != psutil.STATUS_STOPPED
    stuck = job.hurt(Kind.STUCK, [3])
    assert stuck.pid == workers[3].pid and workers[3].is_running()
    assert (job.folder / f'stall.{workers[3].pid}').exists()
    job.hurt(Kind.STOP, [2])
    while workers[2].status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    lost = job.hurt(Kind.NODE, [1, 0])
    assert (lost.kind, lost.pid) == (Kind.NODE, workers[1].pid)
    assert not psutil.wait_procs(workers[:2], timeout=WAIT_S)[1]
    assert not (tmp_path / 'memory' / 'node0').exists()
    job.hurt(Kind.WHOLE, range(4))
    assert not psutil.wait_procs(workers, timeout=WAIT_S)[1]
