# SPDX-License-Identifier: Apache-2.0
"""Starts workers from a process that has imported the program."""

import contextlib
import ctypes
import gc
import io
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, Any, BinaryIO

from moevement_ext.errors import LaunchError
from moevement_ext.launch import spare
from moevement_ext.launch.child import Child, ForkedChild, SpawnedChild
from moevement_ext.system import orphans

_STDOUT, _STDERR = 1, 2
_PACKAGE = __name__.partition('.')[0]
_MAX_ANSWER_BYTES = 64
_PR_SET_CHILD_SUBREAPER = 36
# A template that takes longer to answer is killed.
_TO_ANSWER_S = 30.0


class TemplateLost(LaunchError):
    """The template can start no more workers; those that it has forked live on."""


class Template:
    """A process that imports the program and starts workers; see `spare.py`. Not thread-safe.

    Args:
        process: the process.
        connection: socket to it, over which it reports that the program is imported.

    Attributes:
        process: the process, which waits, has become a worker, or is dead.
        fd: readable when the program is imported or the process is dead.
        forks: None before the program is imported; then True if the process can fork any number of
            workers; False if it can only become a worker itself, once.
    """

    def __init__(self, process: Child, connection: socket.socket) -> None:
        self.forks: bool | None = None
        self.process = process
        self.fd = connection.fileno()
        self._socket = connection

    @classmethod
    def spawn(
        cls,
        program: str,
        flags: Sequence[str],
        environment: Mapping[str, str],
        log: BinaryIO | None = None,
    ) -> 'Template':
        """Start a process that imports a program, whose main guard workers then run.

        The first call returns the template of `fork_ahead`, if there is one.

        Args:
            program: path of the program.
            flags: of the program.
            environment: environment of the import.
            log: file for the output of the import; None: this process's output.
        """
        if _ahead:
            return _ahead.pop()
        own, other = socket.socketpair()
        with other:
            process = SpawnedChild(
                [spare.__file__, program, str(other.fileno()), *flags],
                {**environment, orphans.SPARE: '1'},
                log,
                pass_fds=[other.fileno()],
            )
        return cls(process, own)

    def handle_message(self) -> bool:
        """Wait until the program is imported; False if the process dies before."""
        if self.forks is None:
            with contextlib.suppress(OSError):
                answer = self._socket.recv(_MAX_ANSWER_BYTES)
                self.forks = json.loads(answer) if answer else None
                self._socket.settimeout(_TO_ANSWER_S)
        return self.forks is not None

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[Any],
        errors: IO[Any] | None = None,
    ) -> Child:
        """Start a worker with this complete environment; waits until the program is imported.

        `output` receives its stdout, `errors` its stderr (None: `output`).

        Raises `TemplateLost` if the process is dead, or cannot start another worker, and
        `OSError` if there is no room for one.
        """
        if not self.handle_message():
            raise TemplateLost('the template of all workers is gone')
        order = {'argv': list(command), 'env': dict(environment)}
        outputs = [output.fileno(), (errors or output).fileno()]
        if self.forks:
            adopt = partial(ctypes.CDLL(None).prctl, _PR_SET_CHILD_SUBREAPER)
            adopt(1)  # the worker, whose parent ends on purpose
            try:
                return ForkedChild(self._ask_for_fork(order, outputs))
            finally:
                adopt(0)  # later orphans are not this process's to reap
        self._send('become', order, outputs)
        self._socket.close()
        return self.process

    def _ask_for_fork(self, order: Any, outputs: Sequence[int]) -> int:
        self._send('fork', order, outputs)
        try:
            answer = self._socket.recv(_MAX_ANSWER_BYTES)
        except OSError:
            self._socket.shutdown(socket.SHUT_RD)  # a worker that answers later ends at once
            answer = self._socket.recv(_MAX_ANSWER_BYTES)
        if not answer:
            raise self._lost('')
        if int(answer) < 0:
            raise OSError(-int(answer), os.strerror(-int(answer)))
        return int(answer)

    def _send(self, request: str, order: Any, outputs: Sequence[int]) -> None:
        try:
            text = json.dumps({request: order}).encode() + b'\n'
            sent = socket.send_fds(self._socket, [text], outputs)
            if sent < len(text):  # an order may be larger than the socket's buffer
                self._socket.sendall(text[sent:])  # only if needed: a new worker closes its end
        except OSError as error:
            raise self._lost(f': {error}') from error

    def _lost(self, why: str) -> TemplateLost:
        self.process.signal(signal.SIGKILL)  # it may hang
        return TemplateLost(f'the template of all workers is gone{why}')

    def close(self) -> int:
        """Kill the template, not the workers that it has forked; return as `reap`."""
        self.process.signal(signal.SIGKILL)
        code = self.process.reap()
        self._socket.close()
        return code


_ahead: list[Template] = []


def not_importable(program: str) -> str | None:
    """Why a program cannot be imported before a worker is wanted; None if it can."""
    declared = False
    try:
        declared = spare.split(program) is not None
    except ValueError as error:
        return str(error)
    except (OSError, SyntaxError):  # the worker says why
        pass
    return None if declared else f'{program} does not declare {spare.DECLARATION} (see docs/api.md)'


def fork_ahead(
    program: str, flags: Sequence[str], environment: Mapping[str, str], log: BinaryIO | None = None
) -> None:
    """Fork the next template from this process, whose modules but this package's it shares.

    Does nothing if this process has other threads or has used a GPU. Workers end as a program does,
    by an exception: the callers of this function must let it pass. Arguments as for `spawn`.
    """
    if not spare.can_fork():
        return
    gc.freeze()  # otherwise both collectors copy the pages of all modules
    own, other = socket.socketpair()
    parent, pid = os.getpid(), os.fork()
    if pid:
        other.close()
        own.recv(1)  # now it leads a process group, which can be signalled
        _ahead.append(Template(ForkedChild(pid), own))
        return
    own.close()
    spare.bind(parent)
    other.sendall(b'\0')
    outputs = (_STDOUT, _STDERR) if log is None else (log.fileno(),) * 2
    order = {'argv': [program, *flags], 'env': dict(environment)}
    spare.take_over(order, [os.dup(output) for output in outputs])
    if 'PYTHONUNBUFFERED' in environment:
        unbuffered = open(_STDOUT, 'wb', 0, closefd=False)
        sys.stdout = io.TextIOWrapper(unbuffered, write_through=True)
    with orphans.mark_forks():
        for name in [name for name in sys.modules if name.partition('.')[0] == _PACKAGE]:
            del sys.modules[name]  # the program's own may be of another checkout
        spare.run(other, program, list(flags))
    sys.exit(0)
