# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of emulated nodes on this machine."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from moevement_ext.coordinator.keeper import Keeper
from moevement_ext.errors import EXIT_WHOLE_JOB, LaunchError
from moevement_ext.events import Event
from moevement_ext.launch import messages
from moevement_ext.launch.child import FdLoop
from moevement_ext.launch.environment import (
    check_devices,
    default_variables_here,
    job_variables,
    name_here,
    variables_here,
)
from moevement_ext.launch.guests import Guests
from moevement_ext.launch.launch_config import REQUEUE, LaunchConfig, StagedAction
from moevement_ext.launch.machine import Machine
from moevement_ext.launch.remote import Children, RemoteChild
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.replicate.secret import given_in, of_coordinator, variables

_TURN_S = 1.0
_HERE = '127.0.0.1'


class LocalStarter:
    """`Starter` of workers on this machine; `loop` calls it after events of the machine.

    Each emulated node has a seat of its own, until the node is lost for good.

    Raises `ConfigurationError` if the GPUs of this machine do not fit the job.
    """

    def __init__(self, config: LaunchConfig, loop: FdLoop, report: Callable[[Event], None]) -> None:
        check_devices(config)
        self._config = config
        self._report = report
        self._children = Children(report)
        self.moves_ranks = config.when_no_spare != REQUEUE
        self._names = [name_here(node) for node in range(config.nodes)]
        nodes = dict.fromkeys(self._names, self)
        self.guests = Guests(config, self._children, nodes, report, self._devices)
        self._seating = self.guests.seating
        for node, name in enumerate(self._names):
            self._seating.take(node, name)
        self.guests.usable = self._names
        self._machine: Machine | None = None
        self._secret = variables()
        self._keeper = Keeper(_HERE, of_coordinator(given_in(self._secret)))
        self._variables: dict[str, str] = {}
        self._own = FdLoop()
        loop.watch(self._own.fd, partial(self._own.turn, 0.0))
        self._messages: deque[messages.FromAgent] = deque()
        self._has_messages = os.eventfd(0)
        self._own.watch(self._has_messages, self._act)

    def open(self, port: int, ranks: int) -> None:
        at = self._keeper.address[1]
        self._variables = job_variables(self._config, ranks, _HERE, port, at)
        if self._machine is None:
            job = messages.program(self._config, default_variables_here(self._config))
            self._machine = Machine(job, self._secret, self._own, self._send, self._report)
            self.send(messages.KeepSpares(self._config.spares))

    def start(
        self, rank: int, restarts: int, on_iteration: Callable[[int], None] | None = None
    ) -> RemoteChild:
        node = self._config.node_of(rank)
        if node in self._seating.empty:
            if not self.guests.take(node):
                raise LaunchError(
                    f'node {node} of the job is lost, and no spare node is left'
                    f'{self.guests.refusals(node)}',
                    EXIT_WHOLE_JOB,
                )
        host = self._names.index(self._seating.hosts[node])
        own = variables_here(self._config, rank, restarts, host, node in self._seating.guests)
        child = self._children.add(rank, restarts, {**self._variables, **own}, on_iteration)
        child.start_on(self)
        return child

    def reserve(self, memory: Path, files: Sequence[bytes]) -> None:
        """Reserves nothing: there is no spare node."""
        self.guests.learn(memory, files)

    def spares_left(self) -> str:
        ready, starting = (0, 0) if self._machine is None else self._machine.spares.count
        more = f' ({starting} starting)' if starting else ''
        hot = f'{ready} hot{more}' if self._config.spares else '0 hot (none asked for)'
        return '; '.join(filter(None, [hot, self._seating.describe()]))

    def poll(self) -> None:
        if self._machine is not None:
            self._machine.report_kills()
        if not self._seating.hosts:  # the job waits, so that no iteration lets a node return
            self.guests.usable = self._names
        for name in self.guests.usable:
            if name not in self._seating.seats:
                self.guests.bring_home(name)

    def lose_node(
        self, node: int, memory: Callable[[str], NodeStore], for_good: bool = False
    ) -> Path:
        name = self._names[node]
        store = memory(name)
        self.send(messages.SimulateNodeLoss(name, str(store.root), store.run_id))
        if for_good:
            self.guests.lose(name, f'{StagedAction.LOSE_NODE} {node}')
        return store.path

    def return_node(self, node: int) -> None:
        there = {*self.guests.usable, self._names[node]}
        self.guests.usable = [name for name in self._names if name in there]

    def _devices(self, node: int) -> list[int]:
        """GPUs of a node's ranks; none if all ranks of the job share one anyway."""
        return [] if self._config.share_gpu else list(self._config.ranks_of(node))

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
        self._keeper.close()
        self._own.close()
        os.close(self._has_messages)

    # As the node of a child

    def send(self, message: messages.FromSupervisor) -> None:
        assert self._machine is not None
        self._machine.obey(message)

    def handle_message(self) -> None:
        self._own.turn(_TURN_S)

    def give_up(self, why: str) -> None:
        """Raise `LaunchError`, as there is no other machine."""
        raise LaunchError(f'{why}; this machine may have to be restarted.')

    def _send(self, message: messages.FromAgent) -> None:
        """Queue the message for the next turn, as the supervisor may be inside a call."""
        self._messages.append(message)
        os.eventfd_write(self._has_messages, 1)

    def _act(self) -> None:
        os.eventfd_read(self._has_messages)
        while self._messages:
            message = self._messages.popleft()
            if isinstance(message, messages.MemorySeen):
                self.guests.on_memory_seen(message)
            else:
                self._children.act(message)
