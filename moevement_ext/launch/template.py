# SPDX-License-Identifier: Apache-2.0
"""Forks workers from one process that has imported the program."""

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from moevement_ext.launch.child import OwnChild, SpawnedChild
from moevement_ext.launch.launch_errors import LaunchError

_SPARE = Path(__file__).with_name('spare.py')
_MAX_ANSWER_BYTES = 64


class TemplateLost(LaunchError):
    """The template ended, and with it all workers."""


class Template:
    """The process that forks workers; see `spare.py`. One thread uses it.

    Args:
        program: the program to import; workers call its `main()`.
        environment: environment of the import.
    """

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        self._socket, other = socket.socketpair()
        with other:
            command = [str(_SPARE), program, str(other.fileno())]
            self._process = SpawnedChild(
                command, environment, stdout=None, stderr=None, pass_fds=[other.fileno()]
            )

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], log: BinaryIO | None
    ) -> 'ForkedChild':
        """Fork a worker; waits until the program is imported.

        Args:
            command: program and its flags.
            environment: the worker's complete environment.
            log: file that the worker prints on; None: `ForkedChild.output`.
        """
        order = {'argv': list(command), 'env': dict(environment), 'log': None}
        if log is not None:
            return ForkedChild(self, self.ask('fork', order, [log.fileno()]), None)
        output, other = os.pipe()
        try:
            return ForkedChild(self, self.ask('fork', order, [other]), output)
        finally:
            os.close(other)

    def ask(self, request: str, value: Any, descriptors: Sequence[int] = ()) -> int:
        """Send one request and return its answer.

        Raises:
            TemplateLost: the template does not answer.
        """
        try:
            text = json.dumps({request: value}).encode() + b'\n'
            sent = socket.send_fds(self._socket, [text], list(descriptors))
            self._socket.sendall(text[sent:])  # an order may be larger than the socket's buffer
            answer = self._socket.recv(_MAX_ANSWER_BYTES)
        except OSError as error:
            raise TemplateLost(f'the template of all workers is gone: {error}') from error
        if not answer:
            raise TemplateLost('the template of all workers is gone')
        return int(answer)

    def close(self) -> None:
        """Kill the template, and with it all workers."""
        self._process.signal(signal.SIGKILL)
        self._process.reap()
        self._process.close()
        self._socket.close()


class ForkedChild(OwnChild):
    """A forked worker; its parent, the template, reports its exit code."""

    def __init__(self, template: Template, pid: int, output: int | None) -> None:
        super().__init__(pid, os.pidfd_open(pid))
        self.output = output
        self._template = template

    def close(self) -> None:
        """Close the pipe."""
        if self.output is not None:
            os.close(self.output)
            self.output = None

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
