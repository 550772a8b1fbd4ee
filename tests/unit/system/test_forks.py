# SPDX-License-Identifier: Apache-2.0
"""Forked children must not keep their parent's connections or collect its garbage."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext.system import process_setup
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
