# SPDX-License-Identifier: Apache-2.0
"""A hot spare: imports a program, then waits to become a worker or to fork workers.

    spare.py <program> <socket> <flag> ...

Imports of torch and Megatron take many seconds, which a spare spends in advance. The program must
declare (see `split`) that its import is the same in every process: here it knows no rank yet. A
spare runs the program as `python <program>` does, up to its main guard, which a worker runs. It
also calls the program's `warm_up(flags)`, if defined. Then it reports on the socket (the number of
a descriptor) whether it can fork workers: not if the imports have started threads or used a GPU, as
neither works in a fork. Requests are lines of JSON:

    {"fork": order}    forks a worker, which answers its process id; if there is no room for it, the
                       answer is a negative error number
    {"become": order}  becomes a worker itself

An order is {"argv": [...], "env": {...}}, with the complete environment; the descriptors of the
worker's stdout and stderr come with it. If the connection ends, the spare ends. A forked worker is
a child of the launcher, which must adopt orphans during the fork: it outlives the spare, but not
the launcher. This file runs without the package, so that `sys.path` and the imported modules are
those of the program.
"""

import __future__

import ast
import ctypes
import errno
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType, ModuleType
from typing import Any, NoReturn

_STDIN, _STDOUT, _STDERR = range(3)
_PR_SET_PDEATHSIG = 1
_PIECE_BYTES = 1 << 20
_DRIVER = 'libcuda.so.1'
_GPUS = '/dev/nvidiactl'
# Result of the CUDA driver.
_NOT_INITIALIZED = 3
DECLARATION = 'MOEVEMENT_SPARES = True'
"""Line at the top level of a program that spares may import; see `split`."""
_GUARD = "__name__ == '__main__'"

# Environment variables that the program has set because they were missing, as in a new process.
_set_by_import: dict[str, str] = {}


def main() -> None:
    program, descriptor, *flags = sys.argv[1:]
    run(socket.socket(fileno=int(descriptor)), program, flags)


def run(launcher: socket.socket, program: str, flags: list[str]) -> None:
    """Import the program and serve requests over this socket; return after a worker's work."""
    if os.path.exists(_GPUS):  # torch then counts them without using one
        os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'
    before = set(os.environ)
    with launcher:
        start = import_program(program, flags)
        main = sys.modules['__main__']
        if hasattr(main, 'warm_up'):
            main.warm_up(flags)
        _set_by_import.update((k, v) for k, v in os.environ.items() if k not in before)
        # Otherwise every worker's collector visits all imported objects and so copies their pages.
        gc.collect()
        gc.freeze()
        report(launcher)
        is_worker = serve(launcher, start)
    if is_worker:
        start()


def report(launcher: socket.socket) -> None:
    """Report that the program is imported, and whether this process can fork workers."""
    with suppress(BrokenPipeError):  # the launcher is gone
        launcher.sendall(json.dumps(can_fork()).encode() + b'\n')


def can_fork() -> bool:
    """True unless this process has other threads or has used a GPU."""
    return len(os.listdir('/proc/self/task')) == 1 and not _used_a_gpu()


def _used_a_gpu() -> bool:
    with open('/proc/self/maps') as maps:
        if not any(_DRIVER.removesuffix('.1') in line for line in maps):
            return False
    found: int = ctypes.CDLL(_DRIVER).cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return found != _NOT_INITIALIZED


def serve(launcher: socket.socket, start: Callable[[], None]) -> bool:
    """Serve requests until the launcher is gone; True if this process must become a worker."""
    parent = os.getppid()
    while True:
        text, outputs, _, _ = socket.recv_fds(launcher, _PIECE_BYTES, 2)
        while text and not text.endswith(b'\n'):
            more = launcher.recv(_PIECE_BYTES)
            text = text + more if more else b''
        if not text:
            return False
        ((request, order),) = json.loads(text).items()
        if request == 'become':
            take_over(order, outputs)
            return True
        between = _fork(launcher)
        if between == 0:
            between = os.getpid()
            if _fork(launcher) == 0:
                while os.getppid() == between:  # then the launcher adopts this fork
                    time.sleep(0.001)
                bind(parent)
                _run(launcher, start, order, outputs)
            os._exit(0)
        for output in outputs:
            os.close(output)
        if between is not None:
            os.waitpid(between, 0)


def _fork(launcher: socket.socket) -> int | None:
    """Fork as `os.fork` does; None if there is no room, which the launcher is told."""
    sys.stdout.flush()
    try:
        return os.fork()
    except OSError as error:
        launcher.sendall(b'%d' % -(error.errno or errno.EAGAIN))
        return None


def _run(
    launcher: socket.socket, start: Callable[[], None], order: dict[str, Any], outputs: list[int]
) -> NoReturn:
    """Run as a worker and exit as Python does after a program."""
    launcher.sendall(b'%d' % os.getpid())  # fails if the launcher waits no longer
    launcher.close()
    take_over(order, outputs)
    start()
    sys.exit(0)


def bind(parent: int) -> None:
    """Put this fork into a session of its own, and let Linux kill it when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()


def split(program: str) -> tuple[CodeType, CodeType] | None:
    """What a program does when it is imported, and its main guard; None without `DECLARATION`.

    Raises `OSError`, `SyntaxError`, and `ValueError` if its last statement is not a main guard.
    """
    path = os.path.abspath(program)
    with open(path, 'rb') as file:
        imported = ast.parse(file.read(), path)
    if all(ast.unparse(statement) != DECLARATION for statement in imported.body):
        return None
    guard = imported.body.pop()
    if not (isinstance(guard, ast.If) and ast.unparse(guard.test) == _GUARD):
        raise ValueError(
            f'{program}: {DECLARATION} needs "if {_GUARD}:" as the last statement, which a spare '
            'runs when it becomes a worker'
        )
    before = compile(imported, path, 'exec', dont_inherit=True)
    future = before.co_flags & __future__.annotations.compiler_flag
    return before, compile(ast.Module([guard], []), path, 'exec', future, dont_inherit=True)


def import_program(program: str, flags: list[str]) -> Callable[[], None]:
    """Run a program as `python <program>` does, up to its main guard, which the result runs."""
    parts = split(program)
    if parts is None:
        sys.exit(f'{program} does not declare {DECLARATION}, which --spares needs')
    sys.path[0] = os.path.dirname(os.path.realpath(program))
    sys.argv = [program, *flags]
    main = sys.modules['__main__'] = ModuleType('__main__')
    main.__file__ = os.path.abspath(program)
    imported, guard = parts
    exec(imported, main.__dict__)
    return partial(exec, guard, main.__dict__)


def take_over(order: dict[str, Any], outputs: list[int]) -> None:
    """Take the arguments and environment of an order, these outputs, and empty stdin."""
    sys.stdout.flush()
    for output, stream in zip(outputs, (_STDOUT, _STDERR), strict=True):
        os.dup2(output, stream)
        os.close(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STDIN)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(_set_by_import | order['env'])
    sys.argv = order['argv']


if __name__ == '__main__':
    main()
