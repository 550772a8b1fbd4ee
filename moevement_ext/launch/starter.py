# SPDX-License-Identifier: Apache-2.0
"""How the workers of a job come to life: here as processes of this machine."""

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from moevement_ext.events import Event
from moevement_ext.launch.child import Child, SpawnedChild
from moevement_ext.launch.config import LaunchConfig
from moevement_ext.launch.environment import (
    check_devices,
    job_environment,
    rank_environment,
)
from moevement_ext.launch.errors import LaunchError
from moevement_ext.launch.loop import Loop
from moevement_ext.launch.spare_pool import SparePool
from moevement_ext.launch.template import Template
from moevement_ext.memory.node_store import NodeStore


class Starter(Protocol):
    """What starts workers for the supervisor; used by its thread alone."""

    def open(self, port: int) -> None:
        """Be ready for workers that meet in the store at `port`; again if there is a new one."""

    def start(self, rank: int, restarts: int) -> tuple[Child, bool]:
        """A new life of a rank.

        Returns:
            The process (`pid` 0: it is still to be started, and is reported then), and True if it
            was a hot spare.
        """

    def keep_spares(self) -> None:
        """All workers are started: so may be hot spares, which have time."""

    def spares_left(self) -> str:
        """What is ready to take the place of the next that is lost, in words."""

    def look(self) -> None:
        """Do what is due; called ten times a second.

        Raises:
            LaunchError: a worker cannot be started.
        """

    def lose_node(
        self, node: int, workers: Sequence[Child], memory: Callable[[str], NodeStore]
    ) -> Path | None:
        """Kill all that runs on a node of the job, and delete what it keeps in memory.

        Args:
            node: number.
            workers: that run there.
            memory: of a node, by its name.

        Returns:
            Where its memory was; None: nothing runs there.
        """

    def give_up(self, worker: Child, why: str) -> None:
        """A worker was killed and does not die: end it as one of a lost node is ended.

        Raises:
            LaunchError: that is not possible.
        """

    def close(self) -> None:
        """Let nothing run any more; all workers are dead."""


class LocalStarter:
    """Starts workers on this machine, from hot spares or a template if the job has them.

    Args:
        config: of the job.
        loop: calls when a spare is ready or dead.
        report: called with what happened.

    Raises:
        ConfigurationError: the GPUs of this machine do not fit the job.
    """

    def __init__(self, config: LaunchConfig, loop: Loop, report: Callable[[Event], None]) -> None:
        check_devices(config)
        self._config = config
        self._loop = loop
        self._report = report
        self._spares: SparePool | None = None
        self._template: Template | None = None

    def open(self, port: int) -> None:
        """Be ready for workers that meet at `port`; spares that know another store end."""
        self._environment = job_environment(self._config, port)
        if self._spares is not None:
            self._spares.close()
        self._spares = SparePool(self._config, self._environment, self._loop, self._report)
        if self._config.fork and self._template is None:
            self._template = Template(self._config.program, self._environment)

    def start(self, rank: int, restarts: int) -> tuple[Child, bool]:
        """A new life of a rank: a hot spare, a fork of the template, or a new process."""
        assert self._spares is not None
        own = rank_environment(self._config, rank, restarts)
        log = self._config.log_of(rank)
        spare = self._spares.take(own, log)
        if spare is not None:
            return spare, True
        environment = {**self._environment, **own}
        command = [self._config.program, *self._config.flags]
        if log is None:
            return self._start_process(command, environment, None), False
        with log.open('ab') as output:
            return self._start_process(command, environment, output), False

    def keep_spares(self) -> None:
        """Start as many hot spares as are wanted."""
        assert self._spares is not None
        for _ in range(self._config.spares):
            self._spares.start()

    def spares_left(self) -> str:
        """Hot spares; another process is always to be had, and starts more slowly."""
        ready, starting = (0, 0) if self._spares is None else self._spares.count
        more = f' ({starting} starting)' if starting else ''
        return f'{ready} hot{more}' if self._config.spares else '0 hot (none asked for)'

    def look(self) -> None:
        """Nothing is ever due."""

    def lose_node(
        self, node: int, workers: Sequence[Child], memory: Callable[[str], NodeStore]
    ) -> Path:
        """Kill the workers of an emulated node, and delete what it keeps in memory."""
        for worker in workers:
            worker.signal(signal.SIGKILL)
        for worker in workers:
            worker.ended_well()  # or it might write again what is deleted
        store = memory(f'node{node}')
        store.remove()
        return store.path

    def give_up(self, worker: Child, why: str) -> None:
        """There is no other machine."""
        raise LaunchError(f'{why}; this machine may have to be restarted.')

    def close(self) -> None:
        """End spares and template."""
        if self._spares is not None:
            self._spares.close()
        if self._template is not None:
            self._template.close()

    def _start_process(
        self, command: Sequence[str], environment: Mapping[str, str], log: BinaryIO | None
    ) -> Child:
        if self._template is not None:
            return self._template.fork(command, environment, log)
        stdout = subprocess.PIPE if log is None else log
        return SpawnedChild(command, environment, stdout=stdout, stderr=subprocess.STDOUT)
