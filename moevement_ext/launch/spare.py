# SPDX-License-Identifier: Apache-2.0
"""A hot spare: imports a program, then waits to become a worker or to fork workers.

    spare.py <program> <socket> <flag> ...

Imports of torch and Megatron take many seconds, which a spare spends in advance. It also calls the
program's `warm_up(flags)`, if defined. Then it reports on the socket (the number of a descriptor)
whether it can fork workers: not if the imports have started threads or used a GPU, as neither works
in a fork. Requests and answers are lines of JSON:

    {"fork": order}    forks a worker with the passed descriptor as output; answers its process id,
                       or the negative number of an error
    {"status": pid}    waits for a worker's death; answers as `subprocess.Popen.returncode`
    {"reap": pid}      the same, and releases the process id
    {"become": order}  becomes a worker itself, with the passed descriptor as output

An order is {"argv": [...], "env": {...}}, with the complete environment. A worker calls `main()` of
the program. If the connection ends, the spare ends. This file runs without the package, so that
`sys.path` and the imported modules are those of the program.
"""

import ctypes
import errno
import gc
import importlib.util
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

_STDIN, _STDOUT, _STDERR = range(3)
_PR_SET_PDEATHSIG = 1
_PIECE_BYTES = 1 << 20
_DRIVER = 'libcuda.so.1'
_GPUS = '/dev/nvidiactl'
# Result of the CUDA driver.
_NOT_INITIALIZED = 3

# Environment variables that the program has set because they were missing, as in a new process.
_set_by_import: dict[str, str] = {}


def main() -> None:
    program, descriptor, *flags = sys.argv[1:]
    if os.path.exists(_GPUS):  # torch then counts them without using one
        os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'
    before = set(os.environ)
    with socket.socket(fileno=int(descriptor)) as launcher:
        module = import_program(program, flags)
        if not callable(getattr(module, 'main', None)):
            sys.exit(f'{program} has no function main(), which --spares and --fork need')
        if hasattr(module, 'warm_up'):
            module.warm_up(flags)
        _set_by_import.update((k, v) for k, v in os.environ.items() if k not in before)
        # Otherwise every worker's collector visits all imported objects and so copies their pages.
        gc.collect()
        gc.freeze()
        report(launcher)
        is_worker = serve(launcher, module)
    if is_worker:
        module.main()


def report(launcher: socket.socket) -> None:
    """Report that the program is imported, and whether this process can fork workers."""
    with suppress(BrokenPipeError):  # the launcher is gone
        launcher.sendall(json.dumps(_can_fork()).encode() + b'\n')


def _can_fork() -> bool:
    return len(os.listdir('/proc/self/task')) == 1 and not _used_a_gpu()


def _used_a_gpu() -> bool:
    with open('/proc/self/maps') as maps:
        if not any(_DRIVER.removesuffix('.1') in line for line in maps):
            return False
    found: int = ctypes.CDLL(_DRIVER).cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return found != _NOT_INITIALIZED


def serve(launcher: socket.socket, module: ModuleType) -> bool:
    """Serve requests until the launcher is gone; True if this process must become a worker."""
    while True:
        text, output, _, _ = socket.recv_fds(launcher, _PIECE_BYTES, 1)
        while text and not text.endswith(b'\n'):
            more = launcher.recv(_PIECE_BYTES)
            text = text + more if more else b''
        if not text:
            return False
        ((request, value),) = json.loads(text).items()
        match request:
            case 'become':
                _become_worker(value, output[0])
                return True
            case 'fork':
                answer = _fork(launcher, module, value, output[0])
            case 'status':
                answer = _status(value, os.WNOWAIT)
            case 'reap':
                answer = _status(value, 0)
        launcher.sendall(json.dumps(answer).encode())


def _fork(launcher: socket.socket, module: ModuleType, order: dict[str, Any], output: int) -> int:
    template = os.getpid()
    sys.stdout.flush()
    try:
        pid = os.fork()
    except OSError as error:  # no room for a process; the workers forked before depend on this one
        os.close(output)
        return -(error.errno or errno.EAGAIN)
    if pid == 0:
        launcher.close()
        _run(module, order, output, template)
    os.close(output)
    return pid


def _run(module: ModuleType, order: dict[str, Any], output: int, template: int) -> NoReturn:
    """Run as a worker and exit as Python does after a program."""
    bind(template)
    _become_worker(order, output)
    module.main()
    sys.exit(0)


def bind(parent: int) -> None:
    """Put this fork into a session of its own, and let Linux kill it when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()


def _status(pid: int, options: int) -> int:
    found = os.waitid(os.P_PID, pid, os.WEXITED | options)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def import_program(program: str, flags: list[str]) -> ModuleType:
    """Import the program as a module, with the `sys.path` of `python <program>`."""
    path = os.path.realpath(program)
    name = os.path.splitext(os.path.basename(path))[0]
    sys.path[0] = os.path.dirname(path)
    sys.argv = [program, *flags]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        sys.exit(f'{program} is not a Python program; leave out --spares')
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Child processes of multiprocessing import this file as their main program.
    sys.modules['__main__'].__file__ = path
    spec.loader.exec_module(module)
    return module


def _become_worker(order: dict[str, Any], output: int) -> None:
    sys.stdout.flush()
    os.dup2(output, _STDOUT)
    os.dup2(output, _STDERR)
    os.close(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STDIN)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(_set_by_import | order['env'])
    sys.argv = order['argv']


if __name__ == '__main__':
    main()
