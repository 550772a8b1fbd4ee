# SPDX-License-Identifier: Apache-2.0
"""Lets torchrun's agent fork its workers from one process that has imported the program.

    torchrun --logs-specs moevement ... pretrain_gpt.py ...

torchrun starts each worker as a new interpreter, also those of a restart, and their imports take
many seconds. It loads the class that `--logs-specs` names in its agent, before any worker; this one
logs as the default class does, and replaces the function that starts a process. `moevement
torchrun` does the same without the flag.
"""

import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from moevement_ext.launch.child import Child
from moevement_ext.launch.output import say_of_launcher
from moevement_ext.launch.template import Template, TemplateLost, not_importable

_STDOUT, _STDERR = 1, 2
_UNBUFFERED, _MODULE = '-u', '-m'


class ForkingLogsSpecs(DefaultLogsSpecs):
    """torchrun's default logs; its agent forks the workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fork_workers()


def fork_workers() -> None:
    """Let torchrun's agent in this process fork its workers, if their program declares it."""
    api.get_subprocess_handler = partial(_Handler, _Source())  # type: ignore[attr-defined]


class _Source:
    """Forks workers from a template, which it starts when the first worker is wanted."""

    def __init__(self) -> None:
        self._template: Template | None = None
        self._never = False

    def start(
        self, command: Sequence[str], env: Mapping[str, str], output: IO[Any], errors: IO[Any]
    ) -> Child | None:
        """Start a worker; None if it has to start as a new interpreter.

        Raises `OSError` if there is no room for another process.
        """
        if self._never or tuple(command[:2]) != (sys.executable, _UNBUFFERED):
            return None
        program, *flags = command[2:]
        why = 'name its file, not its module' if program == _MODULE else not_importable(program)
        if why is not None:
            self._give_up(why)
            return None
        template = self._template = self._living(program, flags)
        try:
            worker = template.start([program, *flags], env, output, errors)
        except TemplateLost:
            if template.forks is None:  # the next import would fail, too, and takes as long
                self._give_up(f'importing {program} in advance fails')
            return None
        if not template.forks:
            self._give_up(f'importing {program} starts threads or uses a GPU')
        return worker

    def _living(self, program: str, flags: Sequence[str]) -> Template:
        if self._template is not None:
            if not _is_readable(self._template.process.death, 0.0):
                return self._template
            self._template.close()
        return Template.spawn(program, flags, {**os.environ, 'PYTHONUNBUFFERED': '1'})

    def _give_up(self, why: str) -> None:
        self._never = True
        say_of_launcher(f'each worker starts as a new interpreter: {why}')


class _Handler(SubprocessHandler):
    """torch's handle of a worker, which may be a fork."""

    def __init__(self, source: _Source, **of_worker: Any) -> None:
        self._source = source
        super().__init__(**of_worker)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        output = self._stdout or open(_STDOUT, 'wb', closefd=False)
        errors = self._stderr or open(_STDERR, 'wb', closefd=False)
        worker = self._source.start(args, env, output, errors)
        return super()._popen(args, env) if worker is None else _Process(worker)


class _Process:
    """What torch asks of a worker's process, as `subprocess.Popen` answers it."""

    def __init__(self, worker: Child) -> None:
        self._worker = worker
        self.pid = worker.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return as `Popen`; raises `TimeoutExpired` after these seconds."""
        if self.returncode is None:
            if not _is_readable(self._worker.death, timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = self._worker.reap()
        return self.returncode


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000.0 * timeout_s))
