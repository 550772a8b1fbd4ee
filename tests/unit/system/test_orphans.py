# SPDX-License-Identifier: Apache-2.0
"""A replacement ends the processes that a killed worker left behind, and no others."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moevement_ext.system import orphans

pytestmark = pytest.mark.timeout(300)

_WORKER = """
import multiprocessing, os, sys, time

if __name__ == '__main__':
    os.environ['MOEVEMENT_RUN'] = '/dev/shm/runs/a'  # as find_orphans() has set it
    context = multiprocessing.get_context('spawn')
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""
_SUCCESSOR = """
from pathlib import Path
from moevement_ext.system.orphans import end_orphans, find_orphans
orphans = find_orphans(Path('/dev/shm/runs/a'))
end_orphans(orphans)
print(*(orphan.pid for orphan in orphans))
"""


_FORKS_A_WORKER = """
import os, subprocess, sys
from moevement_ext.system.orphans import mark_forks

mark = mark_forks() if sys.argv[1] == 'marked' else None
if os.fork() == 0:
    place = dict(variable.split('=', 1) for variable in sys.argv[2:])
    os.environ.update(place, MOEVEMENT_RUN='/dev/shm/runs/a')
    child = subprocess.Popen(['sleep', '600'])
    print(child.pid, os.getpid(), flush=True)
    child.wait()
os.wait()
"""


_REAPING_LAUNCHER = """
import ctypes, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as process 1 of a container is
worker, successor = ([sys.executable, '-c', program] for program in sys.argv[1:3])
os.environ.update(variable.split('=', 1) for variable in sys.argv[3:])  # not in its /proc
first = subprocess.Popen(worker, stdout=subprocess.PIPE, start_new_session=True)
print(int(first.stdout.readline()), flush=True)
first.kill()
first.wait()
time.sleep(0.1)  # start times are in hundredths of a second: the successor is younger
subprocess.run(successor, start_new_session=True)
"""


def environment(rank: int, port: str = '4711') -> dict[str, str]:
    place = {'RANK': str(rank), 'LOCAL_RANK': '0'}
    place['MOEVEMENT_NODE'] = f'node{os.getpid()}'  # other processes may run this test concurrently
    return {**os.environ, **place, 'MASTER_PORT': port, 'MASTER_ADDR': '127.0.0.1'}


@pytest.fixture
def workers() -> Iterator[dict[int, tuple[subprocess.Popen, psutil.Process]]]:
    started = {}
    for rank in (0, 1):
        worker = subprocess.Popen(
            [sys.executable, '-c', _WORKER], env=environment(rank), stdout=subprocess.PIPE
        )
        assert worker.stdout is not None
        started[rank] = worker, psutil.Process(int(worker.stdout.readline()))
    yield started
    for worker, child in started.values():
        worker.kill()
        worker.wait()
        if child.is_running():
            child.kill()


_IN_A_WRAPPER = """
(setsid sleep 600 > /dev/null & echo $!)
{python} -c "{program}"
echo wrapped $?
"""
"""At least two commands: a shell would exec a single one."""


@pytest.fixture
def started() -> Iterator[list[psutil.Process]]:
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        if process.is_running():
            process.kill()


def wrapped(program: str, rank: int, port: str = '4711') -> subprocess.Popen:
    """A worker under a wrapper script, which stays alive and has started another process."""
    script = _IN_A_WRAPPER.format(python=sys.executable, program=program)
    return subprocess.Popen(
        ['bash', '-c', script], env=environment(rank, port), stdout=subprocess.PIPE, text=True
    )


def succeed(rank: int, port: str = '4711') -> list[int]:
    output = subprocess.check_output(
        [sys.executable, '-c', _SUCCESSOR], env=environment(rank, port)
    )
    return [int(pid) for pid in output.split()]


@pytest.mark.parametrize('port', ['4711', '4712'], ids=['same launcher', 'launched again'])
def test_successor_ends_only_orphans_of_the_killed_worker(workers: dict, port: str) -> None:
    (lost, orphan), (_, other) = workers[0], workers[1]
    os.kill(lost.pid, signal.SIGKILL)
    lost.wait()
    assert orphan.pid in succeed(0, port)
    orphan.wait(120)
    assert other.is_running() and other.status() != psutil.STATUS_ZOMBIE


def test_orphan_that_the_launcher_has_inherited_is_ended() -> None:
    """A launcher that is process 1 of a container gets all of them."""
    place = [f'{name}={value}' for name, value in environment(0).items()]
    output = subprocess.check_output(
        [sys.executable, '-c', _REAPING_LAUNCHER, _WORKER, _SUCCESSOR, *place]
    )
    orphan, *ended = map(int, output.split())
    if orphan not in ended:
        os.kill(orphan, signal.SIGKILL)
    assert orphan in ended


@pytest.mark.parametrize('port', ['4711', '4712'], ids=['same launcher', 'launched again'])
def test_live_worker_keeps_its_children(workers: dict, port: str) -> None:
    assert succeed(0, port) == []
    assert all(child.is_running() for _, child in workers.values())


@pytest.mark.parametrize('mark', ['marked', 'variable'])
def test_live_worker_that_a_spare_has_forked_keeps_its_children(
    mark: str, started: list[psutil.Process]
) -> None:
    worker = environment(0)
    names = ('RANK', 'LOCAL_RANK', 'MOEVEMENT_NODE', 'MASTER_PORT', 'MASTER_ADDR')
    place = [f'{name}={worker.pop(name)}' for name in names]
    spare = subprocess.Popen(
        [sys.executable, '-c', _FORKS_A_WORKER, mark, *place],
        env=worker | ({orphans.SPARE: '1'} if mark == 'variable' else {}), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert spare.stdout is not None
    started += map(psutil.Process, [*map(int, spare.stdout.readline().split()), spare.pid])
    time.sleep(0.1)  # start times are in hundredths of a second: the next launch is a later one
    assert succeed(0, '4712') == []
    assert all(process.is_running() for process in started)


@pytest.mark.parametrize('port', ['4711', '4712'], ids=['same launcher', 'launched again'])
def test_wrapper_of_a_worker_and_its_children_are_no_orphans(
    workers: dict, port: str, started: list[psutil.Process]
) -> None:
    lost, orphan = workers[0]
    os.kill(lost.pid, signal.SIGKILL)
    lost.wait()
    wrapper = wrapped(_SUCCESSOR, 0, port)
    assert wrapper.stdout is not None
    beside = psutil.Process(int(wrapper.stdout.readline()))
    started.append(beside)
    rest = wrapper.stdout.read().split()
    assert rest[-2:] == ['wrapped', '0'] and wrapper.wait() == 0
    assert str(orphan.pid) in rest and str(beside.pid) not in rest
    assert beside.is_running()


@pytest.mark.parametrize('port', ['4711', '4712'], ids=['same launcher', 'launched again'])
def test_wrapper_with_a_live_worker_is_not_ended(port: str, started: list[psutil.Process]) -> None:
    predecessor = wrapped('import time; print(flush=True); time.sleep(600)', 0)
    started.append(psutil.Process(predecessor.pid))
    assert predecessor.stdout is not None
    started.append(psutil.Process(int(predecessor.stdout.readline())))
    predecessor.stdout.readline()
    started += psutil.Process(predecessor.pid).children()
    successor = wrapped(_SUCCESSOR, 0, port)
    assert successor.stdout is not None
    started.append(psutil.Process(int(successor.stdout.readline())))
    ended = successor.stdout.read().split()[:-2]
    assert str(predecessor.pid) not in ended and successor.wait() == 0
    assert predecessor.poll() is None


def test_processes_of_other_places_cost_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, 'uids', lambda self: pytest.fail('a second look'))
    for name, value in environment(rank=0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('MOEVEMENT_RUN', '')
    assert orphans.find_orphans(Path('/dev/shm/runs/b')) == []
