# SPDX-License-Identifier: Apache-2.0
"""A hot spare: imports a program, then waits to be told which worker it is; or a template of many.

    spare.py <program>
    spare.py <program> <socket>

Imports of torch and Megatron take many seconds, which a replacement that has done them need not.
The spare says on stdout that it is ready (one byte) and waits for a line of JSON on stdin:

    {"argv": [...], "env": {...}, "log": "file to append to, or null to print on stdout"}

It then calls `main()` of the program. If stdin ends instead, so does the spare. It runs as a file,
without the package, so that `sys.path` and what is imported are those of the program.

With a socket (the number of a descriptor) it is the template that workers are forked from. Requests
and answers are lines of JSON:

    {"fork": order}    a new worker, its output the descriptor that is passed along; its process id
    {"status": pid}    once the worker is dead: how it ended, as of `subprocess.Popen.returncode`
    {"reap": pid}      the same, and lets the process id go
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
    os.dup2(_STDERR, _STDOUT)  # what imports print is not the sign of being ready
    module = _import_program(program)
    if not callable(getattr(module, 'main', None)):
        sys.exit(f'{program} has no function main(), which --spares needs; leave out --spares')
    os.write(launcher, b'.')
    line = sys.stdin.readline()
    if line:
        _become_worker(json.loads(line), launcher)
        module.main()


class _Template:
    """Imports a program once; every worker is a copy of the process as it is then."""

    def __init__(self, program: str, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._module = _import_program(program)
        if not callable(getattr(self._module, 'main', None)):
            sys.exit(f'{program} has no function main(), which --fork needs; leave out --fork')

    def serve(self) -> None:
        """Until the launcher is gone; in a worker until that has ended."""
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
        """Be a worker; ends as a program does that Python runs."""
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
    """Run everything at the top level, as `import` does, with the paths of `python <program>`."""
    path = os.path.realpath(program)
    name = os.path.splitext(os.path.basename(path))[0]
    sys.path[0] = os.path.dirname(path)
    sys.argv = [program]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        sys.exit(f'{program} is not a Python program; leave out --spares')
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # What multiprocessing starts anew imports this file as the program's, as if it had been run.
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
