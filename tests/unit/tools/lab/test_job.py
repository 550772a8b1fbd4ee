# SPDX-License-Identifier: Apache-2.0
"""A job is hurt in the ways that it says; real processes that train nothing."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from tools.lab.job import Job, Kind
from tools.lab.launch import Launch
from tools.lab.programs import LabError

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


def test_a_job_has_all_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or none: it ends, and the error has the end of the log."""
    launcher = Mock(deaths=())
    launcher.exit_status.return_value, launcher.tail.return_value = None, 'its last words'
    launcher.pids.side_effect = itertools.chain([{0: 1}], itertools.repeat({0: 1, 1: 2}))
    with Job(Launch(tmp_path / 'a', [], 2, 1), lambda launch: launcher) as job:
        assert job.pids() == [1, 2]
    launcher.reset_mock()
    launcher.pids.side_effect = itertools.repeat({0: 1})
    monkeypatch.setattr('tools.lab.job._STALLED_S', 0)
    with pytest.raises(LabError, match='1 of 2 workers have started in 0 s') as caught:
        Job(Launch(tmp_path / 'b', [], 2, 1), lambda launch: launcher).__enter__()
    assert caught.value.tail == 'its last words'
    launcher.end.assert_called_once_with()


def test_faults_of_each_kind_are_injected(job: Job, tmp_path: Path) -> None:
    workers = [psutil.Process(pid) for pid in job.pids()]
    for kind, why in ((Kind.NODE, 'node1 has no memory to lose'), (Kind.AGENT, 'only a job under')):
        with pytest.raises(LabError, match=why):
            job.hurt(kind, [2])
    assert workers[2].status() != psutil.STATUS_STOPPED
    job.hurt(Kind.STUCK, [3])
    assert workers[3].is_running()
    assert (job.folder / f'stall.{workers[3].pid}').exists()
    job.hurt(Kind.STOP, [2])
    while workers[2].status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    job.hurt(Kind.NODE, [1, 0])
    assert not psutil.wait_procs(workers[:2], timeout=WAIT_S)[1]
    assert not (tmp_path / 'memory' / 'node0').exists()
    job.hurt(Kind.WHOLE, range(4))
    assert not psutil.wait_procs(workers, timeout=WAIT_S)[1]


def test_node_is_lost_for_good(tmp_path: Path) -> None:
    """Its ranks go on beside those of another node."""
    window = tmp_path / 'memory' / 'run' / 'node1' / 'a.window'
    window.parent.mkdir(parents=True)
    window.touch()
    program = tmp_path / 'program.py'
    program.write_text('import time\ntime.sleep(600)\n')
    flags = ['--sparse-ckpt-dir', str(tmp_path / 'memory'), '--sparse-ckpt-run-id', 'run']
    launch = Launch(tmp_path / 'job', flags, 2, 1, 9, program_file=str(program), guests=True)
    with Job(launch, memory=tmp_path / 'memory' / 'run') as job:
        lost = job.pids()[1]
        job.hurt(Kind.AWAY, [1])
        until = time.monotonic() + WAIT_S
        while job.pids()[1] == lost and time.monotonic() < until:
            time.sleep(0.05)
        assert job.ranks_beside(0) == [0, 1]
        assert not window.exists()
