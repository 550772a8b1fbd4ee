# SPDX-License-Identifier: Apache-2.0
"""Forked children must not keep their parent's connections or collect its garbage."""

import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from moevement_ext.system import process_setup
from moevement_ext.system.process_setup import ask_again_soon
from tests.support.readable import readable

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import multiprocessing, os, socket, sys, time
from moevement_ext.system.process_setup import isolate_children

connected = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
if sys.argv[2] == 'on':
    isolate_children()
ours, theirs = multiprocessing.Pipe()  # a pair of local sockets


def work():
    theirs.send('working')
    time.sleep(60)


child = multiprocessing.get_context('fork').Process(target=work)
child.start()
assert ours.recv() == 'working'
connected.sendall(b'talking ')
print(child.pid, flush=True)
time.sleep(60)
"""


GARBAGE = """
import gc, os, threading, torch
import torch.distributed as dist
from moevement_ext.system.process_setup import isolate_children

isolate_children()
gc.disable()  # what is garbage at the fork is up to chance otherwise
store, backends = dist.HashStore(), {}


def connect(rank):
    backends[rank] = [dist.ProcessGroupGloo(store, rank, 2)]


threads = [threading.Thread(target=connect, args=[rank]) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
works = [backend.allreduce([torch.ones(1)]) for (backend,) in backends.values()]
for work in works:
    work.wait()
for circle in backends.values():
    circle.append(circle)
del works, work, circle, thread, threads
backends.clear()
child = os.fork()
if child == 0:
    gc.collect()
    os._exit(0)
print(child, flush=True)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_garbage_process_groups_are_left_to_the_parent(tmp_path: Path) -> None:
    """Collecting them hangs in a fork, which has none of their threads."""
    program = tmp_path / 'program.py'
    program.write_text(GARBAGE)
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert process.wait(120.0) == 0
        finally:
            if process.poll() is None:
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize('on', [True, False])
def test_connections_of_a_killed_process_end_before_its_children(on: bool, tmp_path: Path) -> None:
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)
    with socket.create_server(('127.0.0.1', 0)) as server:
        command = [sys.executable, str(program), str(server.getsockname()[1])]
        environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
        with subprocess.Popen(
            [*command, 'on' if on else 'off'], stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            peer, _ = server.accept()
            assert process.stdout is not None
            child = int(process.stdout.readline())
            try:
                assert peer.recv(8) == b'talking '
                process.kill()
                process.wait()
                ended = readable(peer.fileno(), 120.0 if on else 1.0)
                assert ended is on
                assert not ended or peer.recv(8) == b''
                os.kill(child, 0)  # the child is alive
            finally:
                os.kill(child, signal.SIGKILL)
                peer.close()


def test_descriptors_of_connections_are_not_reused() -> None:
    """The child may close descriptors of former connections at any time."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        pid = os.fork()
        if pid == 0:
            process_setup._drop_connections()
            file = os.open(os.devnull, os.O_RDONLY)
            kept = file != server.fileno() and os.path.samestat(
                os.fstat(server.fileno()), os.stat(os.devnull)
            )
            os._exit(0 if kept else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


ADDRESS = '0000:1b:00.0'
NODE = set(range(16))


@pytest.mark.parametrize(
    ('listed', 'allowed', 'bound'),
    [
        ('0-3,8-11\n', NODE, {0, 1, 2, 3, 8, 9, 10, 11}),
        ('4', NODE, {4}),
        ('0-7', {2, 3, 9}, {2, 3}),
        ('0-7', {2, 3}, None),  # already bound by the launcher
        ('0-7', {8, 9}, None),  # the container has none of the listed CPUs
        ('0-15', NODE, None),
        ('\n', NODE, None),  # a virtual machine
        ('near', NODE, None),
        (None, NODE, None),
    ],
)
def test_process_is_bound_to_the_allowed_cpus_near_its_gpu(
    listed: str | None,
    allowed: set[int],
    bound: set[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if listed is not None:
        (tmp_path / ADDRESS).mkdir()
        (tmp_path / ADDRESS / 'local_cpulist').write_text(listed)
    chosen: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: allowed)
    monkeypatch.setattr(os, 'sched_setaffinity', lambda *given: chosen.append(given))
    assert process_setup.bind(ADDRESS, tmp_path) == bound
    assert chosen == ([] if bound is None else [(0, bound)])


def test_cpu_list_of_this_kernel_is_parsed() -> None:
    assert 0 in process_setup.cpus_in(Path('/sys/devices/system/cpu/present').read_text('ascii'))


@pytest.mark.parametrize(
    ('given', 'expected'), [(None, 'timeout:1 attempts:5'), ('ndots:1', 'ndots:1')]
)
def test_resolver_options_of_the_user_are_kept(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('RES_OPTIONS', given or '')
    if given is None:
        monkeypatch.delenv('RES_OPTIONS')
    ask_again_soon()
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b'RES_OPTIONS') == expected.encode()


@pytest.mark.parametrize(
    'program',
    [
        'moevement_ext.launch.command_line',
        'moevement_ext.launch.slurm',
        'moevement_ext.store',
        'moevement_ext.launch.torchrun',
    ],
)
def test_launchers_set_the_resolver_options(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('RES_OPTIONS', '')
    monkeypatch.delenv('RES_OPTIONS')
    with suppress(SystemExit):  # torch's agent does not exit with SystemExit
        importlib.import_module(program).main(['--unknown'])
    assert os.environ['RES_OPTIONS'] == 'timeout:1 attempts:5'
