# SPDX-License-Identifier: Apache-2.0
"""A peer learns of a process's death although children it forked live on."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext.process import forks

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import multiprocessing, os, socket, sys, time
from moevement_ext.process.forks import close_connections_in_children

connected = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
if sys.argv[2] == 'on':
    close_connections_in_children()
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
                ended = bool(select.select([peer], [], [], 20.0 if on else 1.0)[0])
                assert ended is on
                assert not ended or peer.recv(8) == b''
                os.kill(child, 0)  # lives
            finally:
                os.kill(child, signal.SIGKILL)
                peer.close()


def test_numbers_of_connections_are_not_given_to_other_files() -> None:
    """What the child still believes to be a connection may be closed at any time."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        pid = os.fork()
        if pid == 0:
            forks._drop_connections()
            file = os.open(os.devnull, os.O_RDONLY)
            kept = file != server.fileno() and os.path.samestat(
                os.fstat(server.fileno()), os.stat(os.devnull)
            )
            os._exit(0 if kept else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
