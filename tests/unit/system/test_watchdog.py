# SPDX-License-Identifier: Apache-2.0
"""Definition of silence, and real hung processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import chain, repeat
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from moevement_ext.memory.node_store import noted_deaths
from moevement_ext.system import watchdog, watchdog_process
from moevement_ext.system.watchdog import Watchdog, is_launched, under_torchrun
from moevement_ext.system.watchdog_process import (
    BLOCKED,
    DEATH,
    NOTHING,
    SIGN,
    falls_silent,
    observations,
)
from tests.support.forks import Forked
from tests.support.readable import dies, readable
from tests.unit.membership.clock import Clock
from tests.unit.store.processes import until
from tests.unit.system.joining import join

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]
SILENT_S = 1.0
"""Timeout of processes that must be killed; it can be short."""
NEVER_S = 600.0
WAIT_S = 120.0


# Definition of silence


@pytest.mark.parametrize(
    ('seen', 'silent'),
    [
        ([NOTHING] * 6, True),
        ([NOTHING] * 5 + [DEATH], False),
        (([NOTHING] * 5 + [SIGN]) * 9 + [DEATH], False),  # it wakes up in time, or is slow
        ([SIGN] * 9 + [NOTHING] * 6, True),
        ([NOTHING] * 5 + [BLOCKED] * 7 + [SIGN] + [BLOCKED] * 7 + [DEATH], False),
        ([NOTHING] * 5 + [BLOCKED] * 7 + [NOTHING] * 6, True),
        ([BLOCKED] * 7 + [BLOCKED] * 6, True),  # it counts as stuck
    ],
)
def test_only_consecutive_empty_checks_are_silence(seen: list[str], silent: bool) -> None:
    remaining = iter(seen)
    assert falls_silent(3.0, 4.0, remaining) == silent
    assert not list(remaining), 'it is known no earlier'


def test_time_of_a_stopped_machine_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(watchdog_process, 'time', clock)

    def moved() -> Iterator[str]:
        for seen in [NOTHING] * 5:
            clock.now += 1000.0
            yield seen

    assert not falls_silent(3.0, 0.0, chain(moved(), repeat(DEATH)))


def test_process_with_a_closed_pipe_has_the_usual_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A death shows in the pipe earlier than in the process."""
    monkeypatch.setattr(watchdog_process, '_POLL_S', 0.01)
    near, far = os.pipe()
    with subprocess.Popen(['sleep', '600']) as process, ExitStack() as open_files:
        pidfd = os.pidfd_open(process.pid)
        open_files.callback(os.close, near)
        open_files.callback(os.close, pidfd)
        open_files.callback(process.kill)
        found = observations(pidfd, process.pid, near)
        assert next(found) == NOTHING
        os.write(far, b'.')
        assert next(found) == SIGN
        os.close(far)
        assert [next(found), next(found)] == [NOTHING] * 2
        process.kill()
        process.wait()
        assert next(found) == DEATH


def test_heartbeats_continue_while_threads_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listener = tmp_path / 'listens'
    listener.write_text('import os\nwhile found := os.read(0, 9):\n    os.write(2, found)\n')
    monkeypatch.setattr(watchdog, '_PROGRAM', listener)
    monkeypatch.setattr(watchdog, '_HEARTBEAT_S', 0.01)
    read, write = os.pipe()
    stderr = os.dup(2)
    os.dup2(write, 2)
    try:
        dog = Watchdog(NEVER_S, None)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(write)
    with open(read, 'rb', buffering=0) as heard, closing(dog):
        for _ in range(3):
            assert readable(read, WAIT_S) and heard.read(1)


# Real processes


PROGRAM = """
import ctypes, fcntl, os, signal, sys, termios, time
from pathlib import Path
from moevement_ext.system.watchdog import Watchdog

from tests.support.blocked import block

kept_in = Path(sys.argv[3]) if sys.argv[3:] else None
blocks = sys.argv[1] == 'blocks'
dog = Watchdog(float(sys.argv[2]), kept_in, says=True, blocked_s=3.0 * blocks)
heartbeats = dog._dog.stdin.fileno()
os.write(heartbeats, b'.')
while any(fcntl.ioctl(heartbeats, termios.FIONREAD, bytes(4))):  # until it listens
    time.sleep(0.01)
print(dog._dog.pid, flush=True)
if sys.argv[1] == 'holds the lock':
    ctypes.PyDLL(None).sleep(600)  # without letting other threads of Python run
elif blocks:
    block(kept_in / 'pipe')
elif sys.argv[1] == 'closes':
    dog.close()
signal.pause()
"""


@contextmanager
def watched(
    what: str, *kept_in: Path, silent_s: float = NEVER_S, stderr: int = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, '-c', PROGRAM, what, str(silent_s), *map(str, kept_in)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True,
        env={**os.environ, 'RANK': '3'},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_stopped_process_is_killed_if_no_message_can_be_printed() -> None:
    """Their output goes to a full disk or a closed pipe."""
    with (
        open('/dev/full', 'w') as full,
        watched('sleeps', silent_s=SILENT_S, stderr=full.fileno()) as (process, dog),
    ):
        process.send_signal(signal.SIGSTOP)
        assert process.wait(WAIT_S) == -signal.SIGKILL
        assert dies(dog)


def test_process_with_blocked_threads_is_killed() -> None:
    with watched('holds the lock', silent_s=SILENT_S) as (process, _):
        assert process.wait(WAIT_S) == -signal.SIGKILL


def test_process_blocked_in_the_kernel_is_killed_once_it_counts_as_stuck(tmp_path: Path) -> None:
    began = time.monotonic()
    with watched('blocks', tmp_path, silent_s=SILENT_S) as (process, _):
        code, took_s = process.wait(WAIT_S), time.monotonic() - began
        os.close(os.open(tmp_path / 'pipe', os.O_RDWR))  # lets its child end
    assert code == -signal.SIGKILL and took_s > 3.0


def test_watchdog_ends_with_the_process() -> None:
    with watched('sleeps') as (process, dog):
        assert psutil.pid_exists(dog)
        process.kill()
        assert dies(dog)
        assert process.communicate()[1] == ''


def test_watchdog_ends_when_closed() -> None:
    with watched('closes') as (process, dog):
        assert dies(dog)
        assert process.poll() is None


@pytest.mark.parametrize(
    ('how', 'silent_s'), [(signal.SIGTERM, NEVER_S), (signal.SIGSTOP, SILENT_S)]
)
def test_windows_of_a_dead_process_are_reported(
    how: signal.Signals, silent_s: float, tmp_path: Path
) -> None:
    before = time.time()
    (tmp_path / '3' / '3').mkdir(parents=True)
    (tmp_path / '3' / '3' / 'window-4-plan.window').touch()
    with watched('sleeps', tmp_path, silent_s=silent_s) as (process, _):
        process.send_signal(how)
        said = process.communicate(timeout=WAIT_S)[1].splitlines()[-1]
        assert f'this run was cut off; windows of this run stay in {tmp_path}: ' in said
        assert 'rank 3' not in said  # the rank need not have died first
        (death,) = noted_deaths(tmp_path / 'shared')
        assert (death.rank, death.pid) == (3, process.pid) and before < death.time < time.time()


@pytest.mark.parametrize('file', ['free-0.window', None])
def test_windows_that_do_not_exist_are_not_named(file: str | None, tmp_path: Path) -> None:
    if file is not None:
        (tmp_path / 'kept' / '3' / '3').mkdir(parents=True)
        (tmp_path / 'kept' / '3' / '3' / file).touch()
    with watched('sleeps', tmp_path / 'kept') as (process, _):
        process.terminate()
        assert process.communicate(timeout=WAIT_S)[1] == ''


def test_processes_are_watched_that_a_launcher_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('TORCHELASTIC_RUN_ID', 'TORCHELASTIC_RESTART_COUNT'):
        monkeypatch.delenv(name, raising=False)
    assert not is_launched() and not under_torchrun()
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '0')
    assert is_launched() and not under_torchrun()
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    assert is_launched() and under_torchrun()


@contextmanager
def joining(
    folder: Path, world_size: int, timeout_s: float, trains: bool = False
) -> Iterator[Forked]:
    """A process under torchrun that joins a job through the store of its agent."""
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    environment = {
        'RANK': '0', 'LOCAL_RANK': '0', 'TORCHELASTIC_RUN_ID': 'none',
        'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(store.port),
        'TORCHELASTIC_USE_AGENT_STORE': 'True', 'TORCHELASTIC_RESTART_COUNT': '1',
    }  # fmt: skip
    process = Forked(join, folder, world_size, timeout_s, trains, environment=environment)
    try:
        yield process
    finally:
        process.kill()


def watchers(process: Forked) -> list[list[str]]:
    found = [child.cmdline() for child in psutil.Process(process.pid).children()]
    return [line for line in found if 'watchdog_process.py' in ' '.join(line)]


def test_process_stopped_before_training_is_killed(tmp_path: Path) -> None:
    """Its peers wait for it, and torchrun replaces it only when it is dead."""
    with joining(tmp_path, 1, timeout_s=5.0) as process:  # long enough to join
        assert process.stdout.readline() == 'joined\n'
        process.send_signal(signal.SIGSTOP)
        code, _, said = process.end(WAIT_S)
        assert code == -signal.SIGKILL
        assert f'rank 0 (pid {process.pid}) has sent no heartbeat for 5 s: killed' in said


def test_set_up_is_watched_by_the_timeout_of_the_rendezvous(tmp_path: Path) -> None:
    """Only while it waits for the others nothing can block its heartbeats."""
    with joining(tmp_path, 2, timeout_s=4321.0) as process:
        until(lambda: any('2.0' in line for line in watchers(process)))
    with joining(tmp_path, 1, timeout_s=4321.0) as process:
        assert process.stdout.readline() == 'joined\n'
        (line,) = watchers(process)
        assert '4321.0' in line


def test_training_process_has_no_set_up_watchdog(tmp_path: Path) -> None:
    with joining(tmp_path, 1, timeout_s=60.0, trains=True) as process:
        assert process.stdout.readline() == 'joined\n'
        assert watchers(process) == []
