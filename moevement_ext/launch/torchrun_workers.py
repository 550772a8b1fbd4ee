# SPDX-License-Identifier: Apache-2.0
"""Lets torchrun's agent fork its workers from one process that has imported the program.

    torchrun --logs-specs moevement ... pretrain_gpt.py ...

torchrun starts each worker as a new interpreter, also those of a restart, and their imports take
many seconds. It loads the class that `--logs-specs` names in its agent, before any worker; this one
logs as the default class does, and replaces the function that starts a process. `moevement
torchrun` does the same without the flag.

The workers on other nodes know a fork's death before the kernel has freed its memory, and go on to
the next round; see `system/death_notice.py`.
"""

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import IO, Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from moevement_ext.config import ConfigurationError
from moevement_ext.launch.child import Child, is_ready
from moevement_ext.launch.launch_config import store_address
from moevement_ext.launch.launcher_events import describe_exit, name_of
from moevement_ext.launch.output import say_of_launcher
from moevement_ext.launch.template import Template, TemplateLost, not_importable
from moevement_ext.membership.mailbox import read_survivors
from moevement_ext.membership.rendezvous import announce_failure
from moevement_ext.store import connect
from moevement_ext.system.death_notice import DeathNotice, signal_that_kills

_STDOUT, _STDERR = 1, 2
_POLL_S = 0.5
_STORE_TIMEOUT = timedelta(seconds=60)
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
            if not is_ready(self._template.process.death):
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
        dying = threading.Event()
        notice = DeathNotice(partial(_note, dying))
        worker = self._source.start(args, env | notice.variables, output, errors)
        if worker is None:
            notice.close()
            return super()._popen(args, env)
        return _Process(worker, notice, dying, args, env)


a_death = threading.Event()
"""Set when a fork dies, and cleared by the agent that waits for it."""


def _note(dying: threading.Event) -> None:
    dying.set()
    a_death.set()


class _Process:
    """What torch asks of a worker's process, as `subprocess.Popen` answers it.

    A thread of this object announces the worker's death. `dying` is set when the worker begins to
    die; `command` and `env` are the worker's.
    """

    def __init__(
        self,
        worker: Child,
        notice: DeathNotice,
        dying: threading.Event,
        command: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        self._worker, self._notice, self._dying = worker, notice, dying
        self._command, self._env = command, env
        self.pid = worker.pid
        self.returncode: int | None = None
        threading.Thread(target=self._attend, name='torchrun-worker', daemon=True).start()

    def poll(self) -> int | None:
        """Already answers when a signal kills the worker, whose memory is not freed yet."""
        dying = self.returncode is None and self._dying.is_set()
        if dying and (number := signal_that_kills(self.pid)):
            self._worker.signal(signal.SIGKILL)  # also what it has started
            return -number
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return as `Popen`; raises `TimeoutExpired` after these seconds.

        Waits longer for a killed worker, since another one needs the memory.
        """
        if self.returncode is None:
            left_s = self._worker.to_die_s
            if not is_ready(self._worker.death, timeout if left_s == math.inf else left_s):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = self._worker.reap()
            self._notice.close()
        return self.returncode

    def _attend(self) -> None:
        while self.returncode is None and not self._dying.wait(_POLL_S):
            pass
        code = -signal_that_kills(self.pid) or self.returncode or 0
        if self._dying.is_set() and code < 0:
            with suppress(DistError, ConfigurationError):  # then its successor ends the round
                store, rank = self._connect(), int(self._env['RANK'])
                if store is not None and read_survivors(store):
                    how = f'{name_of(rank, self.pid)} {describe_exit(code)}'
                    announce_failure(store, rank, how)

    def _connect(self) -> TCPStore | None:
        """Connect to the store in which the workers meet; None if that does not outlive them."""
        address = store_address(self._command)
        if address is None and self._env['TORCHELASTIC_USE_AGENT_STORE'] == 'True':
            address = self._env['MASTER_ADDR'], int(self._env['MASTER_PORT'])
        return None if address is None else connect(*address, _STORE_TIMEOUT)
