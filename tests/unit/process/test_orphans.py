# SPDX-License-Identifier: Apache-2.0
"""What a killed worker has left running is ended by its successor, and nothing else is."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]

_WORKER = """
import multiprocessing, os, sys, time

if __name__ == '__main__':
    os.environ['MOEVEMENT_RUN'] = sys.argv[1]  # as end_orphans() has set it
    context = multiprocessing.get_context('spawn')
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""
_SUCCESSOR = """
import sys
from pathlib import Path
from moevement_ext.process.orphans import end_orphans
print(*end_orphans(Path(sys.argv[1])))
"""
Workers = dict[int, tuple[subprocess.Popen[bytes], psutil.Process]]


LAUNCHERS = ['', '-launched-again']


def environment(rank: int, launcher: Path | str) -> dict[str, str]:
    """No other launcher on this machine has the port, whatever runs beside this."""
    place = {'RANK': str(rank), 'LOCAL_RANK': '0'}
    return {**os.environ, **place, 'MASTER_PORT': str(launcher), 'MASTER_ADDR': '127.0.0.1'}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Two ranks, each with a child."""
    started = {}
    for rank in (0, 1):
        worker = subprocess.Popen(
            [sys.executable, '-c', _WORKER, str(tmp_path)],
            env=environment(rank, tmp_path),
            stdout=subprocess.PIPE,
        )
        assert worker.stdout is not None
        started[rank] = worker, psutil.Process(int(worker.stdout.readline()))
    yield started
    for worker, child in started.values():
        worker.kill()
        worker.wait()
        if child.is_running():
            child.kill()


def succeed(run: Path, launcher: str) -> list[int]:
    """Of rank 0."""
    output = subprocess.check_output(
        [sys.executable, '-c', _SUCCESSOR, str(run)], env=environment(0, f'{run}{launcher}')
    )
    return [int(pid) for pid in output.split()]


@pytest.mark.parametrize('launcher', LAUNCHERS)
def test_the_successor_of_a_killed_worker_ends_its_orphans_only(
    workers: Workers, launcher: str, tmp_path: Path
) -> None:
    (lost, orphan), (_, other) = workers[0], workers[1]
    os.kill(lost.pid, signal.SIGKILL)
    lost.wait()
    assert orphan.pid in succeed(tmp_path, launcher)
    orphan.wait(120)
    assert other.is_running() and other.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize('launcher', LAUNCHERS)
def test_a_worker_that_lives_keeps_its_children(
    workers: Workers, launcher: str, tmp_path: Path
) -> None:
    assert succeed(tmp_path, launcher) == []
    assert all(child.is_running() for _, child in workers.values())
