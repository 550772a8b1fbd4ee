# SPDX-License-Identifier: Apache-2.0
"""Starts workers from a process that has imported the program."""

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from moevement_ext.errors import LaunchError
from moevement_ext.launch.child import Child, SpawnedChild
from moevement_ext.system import orphans

_SPARE = Path(__file__).with_name('spare.py')
_MAX_ANSWER_BYTES = 64
# A template that takes longer to answer is killed.
_TO_ANSWER_S = 30.0


class TemplateLost(LaunchError):
    """The template ended, and with it all workers that it had forked."""


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
    ) -> Self:
        """Start a process that imports a program, whose `main()` workers then call.

        Args:
            program: path of the program.
            flags: of the program.
            environment: environment of the import.
            log: file for the output of the import; None: this process's output.
        """
        own, other = socket.socketpair()
        with other:
            process = SpawnedChild(
                [str(_SPARE), program, str(other.fileno()), *flags],
                {**environment, orphans.SPARE: '1'},
                log,
                pass_fds=[other.fileno()],
            )
        return cls(process, own)

    def hear(self) -> bool:
        """Wait until the program is imported; False if the process dies before."""
        if self.forks is None:
            with contextlib.suppress(OSError):
                heard = self._socket.recv(_MAX_ANSWER_BYTES)
                self.forks = json.loads(heard) if heard else None
                self._socket.settimeout(_TO_ANSWER_S)
        return self.forks is not None

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: BinaryIO
    ) -> Child:
        """Start a worker with this complete environment; waits until the program is imported.

        Raises `TemplateLost` if the process is dead, or cannot start another worker, and
        `OSError` if there is no room for one.
        """
        if not self.hear():
            raise TemplateLost('the template of all workers is gone')
        order = {'argv': list(command), 'env': dict(environment)}
        if self.forks:
            pid = self.ask('fork', order, [output.fileno()])
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            try:
                death = os.pidfd_open(pid)
            except OSError:  # too many open files: its death could not be detected
                os.kill(pid, signal.SIGKILL)
                self.ask('reap', pid)
                raise
            return _ForkedChild(self, pid, death)
        self._send('become', order, [output.fileno()])
        self._socket.close()
        return self.process

    def ask(self, request: str, value: Any, descriptors: Sequence[int] = ()) -> int:
        """Send one request and return its answer; `TemplateLost` if the template is dead."""
        self._send(request, value, descriptors)
        try:
            answer = self._socket.recv(_MAX_ANSWER_BYTES)
        except OSError as error:
            raise self._lost(f': {error}') from error
        if not answer:
            raise self._lost('')
        return int(answer)

    def _send(self, request: str, value: Any, descriptors: Sequence[int]) -> None:
        try:
            text = json.dumps({request: value}).encode() + b'\n'
            sent = socket.send_fds(self._socket, [text], list(descriptors))
            if sent < len(text):  # an order may be larger than the socket's buffer
                self._socket.sendall(text[sent:])  # only if needed: a new worker closes its end
        except OSError as error:
            raise self._lost(f': {error}') from error

    def _lost(self, why: str) -> TemplateLost:
        self.process.signal(signal.SIGKILL)  # it may hang
        return TemplateLost(f'the template of all workers is gone{why}')

    def close(self) -> int:
        """Kill the template and thereby all workers that it has forked; return as `reap`."""
        self.process.signal(signal.SIGKILL)
        code = self.process.reap()
        self._socket.close()
        return code


class _ForkedChild(Child):
    """A forked worker; its parent, the template, reports its exit code."""

    def __init__(self, template: Template, pid: int, death: int) -> None:
        super().__init__(pid, death)
        self._template = template

    def _send(self, number: int) -> None:
        try:
            super()._send(number)
        except (
            ProcessLookupError
        ):  # no process group yet, or reaped by init after the template's death
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.death, number)

    def _how_it_ended(self) -> int:
        return self._asked('status')

    def _reap(self) -> int:
        return self._asked('reap')

    def _asked(self, request: str) -> int:
        death = select.poll()  # takes descriptors of any number
        death.register(self.death, select.POLLIN)
        death.poll()
        try:
            return self._template.ask(request, self.pid)
        except TemplateLost:  # Linux has killed its workers
            return -signal.SIGKILL
