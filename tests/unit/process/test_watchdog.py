# SPDX-License-Identifier: Apache-2.0
"""Real processes that hang in all ways there are, and some that only seem to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from moevement_ext.memory.deaths import noted
from moevement_ext.process.watchdog import under_torchrun
from tests.unit.readable import readable

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]
SILENT_S = 5.0
LONG_ENOUGH_S = 1.5 * SILENT_S
PROGRAM = """
import ctypes, sys, time
from pathlib import Path
from moevement_ext.process.watchdog import Watchdog

dog = Watchdog(float(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None, says=True)
print(dog._dog.pid, flush=True)
if sys.argv[1] == 'holds the lock':
    time.sleep(1.0)
    ctypes.PyDLL(None).sleep(60)  # without letting other threads of Python run
elif sys.argv[1] == 'hangs up':
    dog._dog.stdin.close()
elif sys.argv[1] == 'closes':
    time.sleep(1.0)
    dog.close()
time.sleep(60)
"""


@contextmanager
def watched(what: str, *kept_in: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and the one that watches it."""
    process = subprocess.Popen(
        [sys.executable, '-c', PROGRAM, what, str(SILENT_S), *map(str, kept_in)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, 'RANK': '3'},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def ends(pid: int, within_s: float = 20.0) -> bool:
    try:
        death = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return readable(death, within_s)
    finally:
        os.close(death)


def test_a_stopped_process_is_killed() -> None:
    with watched('sleeps') as (process, dog):
        time.sleep(1.0)
        process.send_signal(signal.SIGSTOP)
        _, said = process.communicate(timeout=120.0)
        assert process.returncode == -signal.SIGKILL
        assert f'rank 3 (pid {process.pid}) has given no sign of life for 5 s: killed' in said
        assert ends(dog)


def test_a_stopped_process_is_killed_when_nothing_can_be_said_of_it() -> None:
    """What the processes print goes to a disk that is full, or to nobody."""
    with open('/dev/full', 'w') as full:
        process = subprocess.Popen(
            [sys.executable, '-c', PROGRAM, 'sleeps', str(SILENT_S)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=full, text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        dog = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        assert process.wait(30.0) == -signal.SIGKILL
        assert ends(dog)
    finally:
        process.kill()
        process.communicate()


def test_a_process_whose_threads_cannot_run_is_killed() -> None:
    with watched('holds the lock') as (process, _):
        assert process.wait(120.0) == -signal.SIGKILL


def test_who_sleeps_lives() -> None:
    with watched('sleeps') as (process, _):
        assert not ends(process.pid, LONG_ENOUGH_S)


def test_who_wakes_up_in_time_lives() -> None:
    with watched('sleeps') as (process, _):
        process.send_signal(signal.SIGSTOP)
        time.sleep(SILENT_S / 4)
        process.send_signal(signal.SIGCONT)
        assert not ends(process.pid, LONG_ENOUGH_S)


def test_time_in_which_both_stood_still_does_not_count() -> None:
    """As of a virtual machine that is moved."""
    with watched('sleeps') as (process, dog):
        for pid in (dog, process.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LONG_ENOUGH_S)
        for pid in (dog, process.pid):
            os.kill(pid, signal.SIGCONT)
        assert not ends(process.pid, LONG_ENOUGH_S)


def test_it_ends_with_the_process() -> None:
    with watched('sleeps') as (process, dog):
        assert psutil.pid_exists(dog)
        process.kill()
        assert ends(dog)
        assert process.communicate()[1] == ''


@pytest.mark.parametrize('how', [signal.SIGTERM, signal.SIGSTOP])
def test_who_dies_leaves_windows_that_are_named(how: signal.Signals, tmp_path: Path) -> None:
    before = time.time()
    with watched('sleeps', tmp_path) as (process, _):
        time.sleep(1.0)
        process.send_signal(how)
        said = process.communicate(timeout=120.0)[1].splitlines()[-1]
        assert f'this run was cut off; windows of this run stay in {tmp_path}: ' in said
        assert 'rank 3' not in said  # which need not have died first
        (death,) = noted(tmp_path / 'shared')
        assert (death.rank, death.pid) == (3, process.pid) and before < death.time < time.time()


def test_windows_that_are_given_back_are_not_named(tmp_path: Path) -> None:
    with watched('sleeps', tmp_path / 'removed') as (process, _):
        time.sleep(1.0)
        process.terminate()
        assert process.communicate(timeout=120.0)[1] == ''


def test_a_process_that_hangs_up_has_as_much_time_as_others() -> None:
    """A death shows in the pipe before it shows in the process."""
    with watched('hangs up') as (process, _):
        assert not ends(process.pid, SILENT_S / 2)
        assert process.wait(120.0) == -signal.SIGKILL


def test_nobody_is_killed_after_the_end() -> None:
    with watched('closes') as (process, dog):
        assert ends(dog)
        process.send_signal(signal.SIGSTOP)
        assert not ends(process.pid, LONG_ENOUGH_S)


def test_only_torchrun_leaves_who_hangs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('TORCHELASTIC_RUN_ID', raising=False)
    assert not under_torchrun()
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    assert under_torchrun()


JOINING = """
import sys, time
from datetime import timedelta
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.job.joining import join
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.process import watchdog

what, directory, timeout_s, hang_timeout = sys.argv[1:]
world_size = 2 if what == 'waits' else 1
config = SparseCheckpointConfig(dir=directory, hang_timeout=float(hang_timeout))
identity = RankIdentity('run', 'pp1', 0)
print('joins', flush=True)
join(identity, world_size, 'run', config, timedelta(seconds=float(timeout_s)))
if what == 'trains':
    watchdog.set_up_is_over()
print('joined', flush=True)
time.sleep(60)
"""


@contextmanager
def joining(
    what: str, folder: Path, timeout_s: float = 60.0
) -> Iterator[tuple[subprocess.Popen[str], TCPStore]]:
    """A process under torchrun that takes its place in a job, and the store of its agent."""
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    process = subprocess.Popen(
        [sys.executable, '-c', JOINING, what, str(folder), str(timeout_s), str(SILENT_S)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={
            **os.environ, 'RANK': '0', 'LOCAL_RANK': '0', 'TORCHELASTIC_RUN_ID': 'none',
            'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(store.port),
            'TORCHELASTIC_USE_AGENT_STORE': 'True', 'TORCHELASTIC_RESTART_COUNT': '1',
        },
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == 'joins\n'
        yield process, store
    finally:
        process.kill()
        process.communicate()


def watchers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if 'watchdog_process.py' in ' '.join(child.cmdline())]


def test_who_is_stopped_before_it_trains_is_killed(tmp_path: Path) -> None:
    """Its peers wait for it, and torchrun starts another only when it is dead."""
    with joining('sets up', tmp_path, timeout_s=SILENT_S) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == 'joined\n'
        process.send_signal(signal.SIGSTOP)
        _, said = process.communicate(timeout=60.0)
        assert process.returncode == -signal.SIGKILL
        assert f'rank 0 (pid {process.pid}) has given no sign of life for 5 s: killed' in said


def test_who_waits_for_others_is_watched_for_longer_than_they_are_waited_for(
    tmp_path: Path,
) -> None:
    with joining('waits', tmp_path, timeout_s=4321.0) as (process, _):
        while not (found := watchers(process)):
            time.sleep(0.02)
        assert '4321.0' in found[0].cmdline()


def test_who_trains_is_watched_by_one_alone(tmp_path: Path) -> None:
    with joining('trains', tmp_path) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == 'joined\n'
        assert watchers(process) == []
