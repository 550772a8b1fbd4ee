# SPDX-License-Identifier: Apache-2.0
"""The supervisor's view of workers on any machine, and of their start."""

import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from moevement_ext.events import Event
from moevement_ext.launch.child import Child
from moevement_ext.launch.launcher_events import WorkerLaunched
from moevement_ext.launch.messages import (
    Ended,
    FromAgent,
    FromSupervisor,
    IterationLogged,
    Killed,
    Signal,
    Started,
    StartWorker,
)
from moevement_ext.membership.mailbox import PROCESS, new_process
from moevement_ext.memory.node_store import NodeStore

if TYPE_CHECKING:
    from moevement_ext.launch.guests import Guests

# Includes the import of the program, for which the workers of a node wait.
_TO_START_S = 900.0
_LOST = -signal.SIGKILL
NO_ENDS = signal.SIGSTOP, signal.SIGCONT
"""Signals that do not end a worker which is still to be started."""


class Commands(Protocol):
    """Connection to the node of a worker."""

    def send(self, message: FromSupervisor) -> None:
        """Send a message to the agent; if the agent is lost, its workers count as ended."""

    def handle_message(self) -> None:
        """Wait for a message of the agent and handle it; if the agent is lost, its workers end."""

    def give_up(self, why: str) -> None:
        """Drop the node for the rest of the job; its workers count as ended.

        Raises:
            LaunchError: there is no other node.
        """


class RemoteChild(Child):
    """A worker on any machine; its start may still be pending.

    Args:
        order: message that starts the worker.
        restarts: number of restarts of its rank.
        on_iteration: called with the iterations that the worker logs.

    Attributes:
        pid: process id; 0 before the start.
        last_lines: the last lines of its output.
        lost_with: host with which this process was lost; empty otherwise.
        moves_to: host to which the rank moves, so that this process ends; empty otherwise.
        node: node of the process; None before one is assigned.
        is_settled: it has joined the other ranks, or was killed because it did not.
    """

    def __init__(
        self, order: StartWorker, restarts: int, on_iteration: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(0, os.eventfd(0))
        self.last_lines: list[str] = []
        self.lost_with = self.moves_to = ''
        self.order = order
        self.restarts = restarts
        self.on_iteration = on_iteration
        self.node: Commands | None = None
        self.is_settled = False
        self._code: int | None = None
        self._asked_for_at = self._started_at = math.inf

    @property
    def waits_for_node(self) -> bool:
        return self.node is None and self._code is None

    @property
    def joining_age_s(self) -> float | None:
        """Age of a process that has not joined yet, else None."""
        if self.is_settled or not self.pid:
            return None
        return time.monotonic() - self._started_at

    def start_on(self, node: Commands, variables: Mapping[str, str] | None = None) -> None:
        """Start the worker there, with these further environment variables."""
        self.node = node
        if variables:
            own = {**self.order.variables, **variables}
            self.order = msgspec.structs.replace(self.order, variables=own)
        self._asked_for_at = time.monotonic()
        node.send(self.order)

    def give_up(self, why: str) -> None:
        """Drop the node of a worker that does not die of SIGKILL, or does not start.

        Raises `LaunchError` if there is no other node.
        """
        if self.node is not None and self._code is None:
            self.node.give_up(why)

    @property
    def is_overdue(self) -> bool:
        """True if the agent hangs and has not started the worker in time."""
        waits = self.node is not None and self._code is None and not self.pid
        return waits and time.monotonic() > self._asked_for_at + _TO_START_S

    def started(self, pid: int) -> None:
        self.pid = pid
        self._started_at = time.monotonic()

    def end(self, code: int) -> None:
        """Record the worker's death; `death` becomes readable."""
        if self._code is None:
            self._code = code
            os.eventfd_write(self.death, 1)

    def dies(self) -> bool:
        """Handle messages of the agent until the worker is dead; False if it does not die."""
        while self._code is None and self.to_die_s:
            assert self.node is not None
            self.node.handle_message()
        return self._code is not None

    def _send(self, number: int) -> None:
        if self._code is not None:
            return
        if self.node is not None:
            self.node.send(Signal(self.order.key, number))
        elif number not in NO_ENDS:
            self.end(-number)

    def _how_it_ended(self) -> int:
        while self._code is None:
            assert self.node is not None
            self.node.handle_message()
        return self._code

    def _reap(self) -> int:
        return self._how_it_ended()


class Children:
    """All workers that have not ended. The supervisor's thread uses this object."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report
        self._keys = itertools.count()
        self._children: dict[int, RemoteChild] = {}

    def __iter__(self) -> Iterator[RemoteChild]:
        return iter(list(self._children.values()))

    def add(
        self,
        rank: int,
        restarts: int,
        variables: dict[str, str],
        on_iteration: Callable[[int], None] | None,
    ) -> RemoteChild:
        """Add a worker before its start; see `Starter.start`."""
        variables = {**variables, PROCESS: new_process()}
        order = StartWorker(next(self._keys), rank, variables, watched=on_iteration is not None)
        child = RemoteChild(order, restarts, on_iteration)
        self._children[order.key] = child
        return child

    def act(self, message: FromAgent) -> None:
        match message:
            case Started(key, pid, was_spare):
                child = self._children[key]
                child.started(pid)
                self._report(WorkerLaunched(child.order.rank, pid, child.restarts, was_spare))
            case Killed(key) if key in self._children:
                self._children[key].signal(signal.SIGKILL)  # from now on its death is awaited
            case IterationLogged(key, iteration):
                on_iteration = self._children[key].on_iteration
                if on_iteration is not None:
                    on_iteration(iteration)
            case Ended(key, code, last_lines):
                child = self._children.pop(key)
                child.last_lines = last_lines
                child.end(code)

    def lose(self, node: Commands, host: str) -> None:
        for key, child in list(self._children.items()):
            if child.node is node:
                del self._children[key]
                child.lost_with = host
                child.end(_LOST)


class Starter(Protocol):
    """Starts workers for the supervisor; only the supervisor's thread uses it.

    Attributes:
        guests: hosts and their seats.
        moves_ranks: ranks of a lost node may move to another node.
    """

    guests: 'Guests'
    moves_ranks: bool

    def open(self, port: int, ranks: int) -> None:
        """Prepare for so many workers that use the store at `port`; again for a new store."""

    def start(
        self, rank: int, restarts: int, on_iteration: Callable[[int], None] | None = None
    ) -> RemoteChild:
        """Start or restart a rank; the process is reported once it exists.

        `on_iteration` is called with the iterations that the worker logs, if it has no log file.
        Raises `LaunchError`, with `EXIT_WHOLE_JOB`, if no node takes the rank.
        """

    def reserve(self, memory: Path, files: Sequence[bytes]) -> None:
        """Reserve host memory for ranks that may move to another node.

        `memory` is the directory of the run on each node, `files` the list of each rank's files
        (`memory.reservation`).
        """

    def spares_left(self) -> str:
        """Describe the remaining spares."""

    def poll(self) -> None:
        """Do periodic work, ten times a second; `LaunchError` if a worker cannot be started."""

    def lose_node(
        self, node: int, memory: Callable[[str], NodeStore], for_good: bool = False
    ) -> Path | None:
        """Kill all processes on a node of the job, and delete its host memory.

        `memory` returns the host memory of a node by its name; `for_good`: it stays away until
        `return_node`. Returns the deleted directory; None if the node runs nothing.
        """

    def return_node(self, node: int) -> None:
        """Let a node return that was lost for good; otherwise does nothing."""

    def close(self) -> None:
        """End all other processes; called once all workers are dead."""
