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


class Late:
    """A launcher of two workers, of which one has not started yet."""

    log_of = given_up = None
    deaths: tuple[()] = ()

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left_out = 0

    def start(self) -> None:
        self.calls.append('start')

    def pids(self) -> dict[int, int]:
        self.left_out -= 1
        return {0: 1} if self.left_out >= 0 else {0: 1, 1: 2}

    def exit_status(self) -> None:
        return None

    def tail(self) -> str:
        return 'its last words'

    def end(self) -> None:
        self.calls.append('end')


def test_a_job_has_all_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or none: it ends, and the error has the end of the log."""
    late = Late()
    with Job(Launch(tmp_path / 'a', [], 2, 1), lambda launch: late) as job:  # type: ignore[arg-type, return-value]
        assert 0 not in job.pids()
    late.calls.clear()
    late.left_out = 1_000_000
    monkeypatch.setattr('tools.lab.job._STALLED_S', 0)
    launch = Launch(tmp_path / 'b', [], 2, 1)
    with pytest.raises(LabError, match='1 of 2 workers have started in 0 s') as caught:
        Job(launch, lambda launch: late).__enter__()  # type: ignore[arg-type, return-value]
    assert (caught.value.tail, late.calls) == ('its last words', ['start', 'end'])


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
