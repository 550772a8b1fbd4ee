# SPDX-License-Identifier: Apache-2.0
"""A hot spare, which imports a program and then waits for a rank; or a template to fork.

    spare.py <program>
    spare.py <program> <socket>

Imports of torch and Megatron take many seconds, which a spare spends in advance. The ready spare
writes one byte on stdout and waits for a line of JSON on stdin:

    {"argv": [...], "env": {...}, "log": "file to append to, or null to print on stdout"}

It then calls `main()` of the program. If stdin ends instead, the spare ends. This file runs without
the package, so that `sys.path` and the imported modules are those of the program.

With a socket (the number of a descriptor) the process is the template that forks workers. Requests
and answers are lines of JSON:

    {"fork": order}    forks a worker with the passed descriptor as output; answers its process id
    {"status": pid}    waits for a worker's death; answers as `subprocess.Popen.returncode`
    {"reap": pid}      the same, and releases the process id
"""

import ctypes
import importlib.util
import json
import os
import signal
import socket
import sys
from types import ModuleType
from typing import Any, NoReturn

_STDIN, _STDOUT, _STDERR = range(3)
_PR_SET_PDEATHSIG = 1
_PIECE_BYTES = 1 << 20


def main() -> None:
    """Body of the process."""
    program, *connection = sys.argv[1:]
    if connection:
        _Template(program, socket.socket(fileno=int(connection[0]))).serve()
        return
    launcher = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)  # output of imports must not look like the ready byte
    module = _import_program(program)
    if not callable(getattr(module, 'main', None)):
        sys.exit(f'{program} has no function main(), which --spares needs; leave out --spares')
    os.write(launcher, b'.')
    line = sys.stdin.readline()
    if line:
        _become_worker(json.loads(line), launcher)
        module.main()


class _Template:
    """Imports a program once and forks every worker."""

    def __init__(self, program: str, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._module = _import_program(program)
        if not callable(getattr(self._module, 'main', None)):
            sys.exit(f'{program} has no function main(), which --fork needs; leave out --fork')

    def serve(self) -> None:
        """Serve requests until the launcher is gone; in a worker, run until its end."""
        while True:
            text, output, _, _ = socket.recv_fds(self._launcher, _PIECE_BYTES, 1)
            while text and not text.endswith(b'\n'):
                more = self._launcher.recv(_PIECE_BYTES)
                text = text + more if more else b''
            if not text:
                return
            ((request, value),) = json.loads(text).items()
            match request:
                case 'fork':
                    answer = self._fork(value, output[0])
                case 'status':
                    answer = _status(value, os.WNOWAIT)
                case 'reap':
                    answer = _status(value, 0)
            self._launcher.sendall(json.dumps(answer).encode())

    def _fork(self, order: dict[str, Any], output: int) -> int:
        template = os.getpid()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._launcher.close()
            self._run(order, output, template)
        os.close(output)
        return pid

    def _run(self, order: dict[str, Any], output: int, template: int) -> NoReturn:
        """Run as a worker and exit as Python does after a program."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != template:
            os._exit(1)
        os.setsid()
        os.environ.clear()
        _become_worker(order, output)
        self._module.main()
        sys.exit(0)


def _status(pid: int, options: int) -> int:
    found = os.waitid(os.P_PID, pid, os.WEXITED | options)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _import_program(program: str) -> ModuleType:
    """Import the program as a module, with the `sys.path` of `python <program>`."""
    path = os.path.realpath(program)
    name = os.path.splitext(os.path.basename(path))[0]
    sys.path[0] = os.path.dirname(path)
    sys.argv = [program]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        sys.exit(f'{program} is not a Python program; leave out --spares')
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Child processes of multiprocessing import this file as their main program.
    sys.modules['__main__'].__file__ = path
    spec.loader.exec_module(module)
    return module


def _become_worker(order: dict[str, Any], launcher: int) -> None:
    """Take over environment, arguments and output."""
    sys.stdout.flush()
    output = launcher
    if order['log'] is not None:
        output = os.open(order['log'], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, _STDOUT)
    os.dup2(output, _STDERR)
    os.close(launcher)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STDIN)
    os.environ.update(order['env'])
    sys.argv = order['argv']


if __name__ == '__main__':
    main()
