# SPDX-License-Identifier: Apache-2.0
"""Starts workers on the nodes of an allocation, and those of a lost node on a spare one.

A *seat* is one of the job's nodes: its ranks and their number, `GROUP_RANK`. Hosts take seats; what
is left over is spare, with hot spares for all workers of a seat. A lost host loses its seat to a
spare one at once; is it reached again, while Slurm leaves it in the allocation, it is a spare. A
host with a device that cannot be used counts as lost, for good.

What tells that a host is lost is the connection to its agent, within a second if its processes die
and after `SILENT_S` if it falls silent. Slurm itself knows later: `SlurmdTimeout`, by default 5
minutes; and the step on a lost host comes back then with status 0.
"""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event, decode
from moevement_ext.launch import messages
from moevement_ext.launch.environment import default_variables, job_variables, rank_variables
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.launch_errors import LaunchError
from moevement_ext.launch.launcher_events import (
    DevicesFailing,
    NodeLost,
    NodeMissing,
    NodeReady,
    NodeSeated,
)
from moevement_ext.launch.link import Address, Beats, Link
from moevement_ext.launch.listener import Listener
from moevement_ext.launch.loop import FdLoop
from moevement_ext.launch.node import Node
from moevement_ext.launch.remote import Children, RemoteChild
from moevement_ext.launch.steps import StartStep
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.replicate.greeting import new_secret
from moevement_ext.store import flag
from moevement_ext.store.branches import Branches, announce, needed

logger = logging.getLogger(__name__)

_GATHER_S = 60.0
_CLOSING_S = 10.0
_HERE = '127.0.0.1'


class NoNodeLeft(LaunchError):
    """A seat is empty, and nobody can take it."""

    exit_code = EXIT_WHOLE_JOB


class SlurmStarter:
    """A `Starter` of workers on other nodes.

    Args:
        hosts: of the allocation; the first ones take seats, in this order.
        start_step: starts the agent of a host.
        config: of the job; `nodes` is the number of seats.
        loop: calls when an agent says something.
        report: called with what happened.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        start_step: StartStep,
        config: LaunchConfig,
        loop: FdLoop,
        report: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._loop = loop
        self._report = report
        self._start_step = start_step
        self._nodes = {
            host: Node(host, loop, self._act, self._lost, self._missed) for host in hosts
        }
        self._children = Children(report)
        self._secret = new_secret()
        self._listener: Listener | None = None
        self._branches: Branches | None = None
        self._began = 0.0
        self._vacated = 0.0
        self._met = False
        self._gathered = False

    def open(self, port: int) -> None:
        """Be ready for workers that meet at `port`; at first, ask all hosts for an agent."""
        self._variables = job_variables(self._config, socket.gethostname(), port)
        if flag.address(self._config.flags) is None:  # else it is not on this host
            self._branch(port)
        if self._listener is None:
            self._listener = Listener(self._secret)
            self._loop.watch(self._listener.fd, self._arrivals)
            self._address = Address(socket.gethostname(), self._listener.port, self._secret)
            self._began = time.monotonic()
            self._beats = Beats(self._links)
            for node in self._nodes.values():
                self._ask_for_agent(node)

    def start(
        self, rank: int, restarts: int, heard: Callable[[int], None] | None = None
    ) -> RemoteChild:
        """A new life of a rank, which starts once its seat is taken."""
        own = rank_variables(self._config, rank, restarts)
        child = self._children.add(rank, restarts, {**self._variables, **own}, heard)
        self._start_waiting()
        return child

    def keep_spares(self) -> None:
        """Spare nodes have nothing else to do: they had them from the start."""

    def spares_left(self) -> str:
        """Nodes of the allocation that wait to take the place of another."""
        spare = [node.host for node in self._nodes.values() if node.is_spare]
        names = f' ({" ".join(spare)})' if spare else ''
        return f'{len(spare)} nodes{names}'

    def look(self) -> None:
        """Do what is due: lost nodes, free hosts, agents that do not come.

        Raises:
            LaunchError: a seat is empty, and no host is there or may come to take it.
        """
        for node in self._nodes.values():
            node.look()
        for child in [child for child in self._children if child.is_overdue]:
            child.give_up(f'its agent does not start rank {child.order.rank}')
        self._gathered = self._gathered or self._are_enough()
        if self._gathered:
            self._take_seats()
        for node in self._nodes.values():
            if node.is_due:
                self._ask_for_agent(node)

    def lose_node(self, node: int, memory: Callable[[str], NodeStore]) -> Path | None:
        """Have all that runs on the host in a seat killed, and its memory deleted."""
        host = next((one for one in self._nodes.values() if one.seat == node), None)
        if host is None:
            return None  # it was lost without that
        store = memory(host.host)
        host.send(messages.Vanish(host.host, str(store.root), store.run_id))
        return store.path

    def close(self) -> None:
        """End all agents."""
        if self._branches is not None:
            self._branches.close()
        if self._listener is not None:
            self._listener.close()
            self._beats.close()
        deadline = time.monotonic() + _CLOSING_S
        for node in self._nodes.values():
            node.disconnect()
        for node in self._nodes.values():
            node.close(max(deadline - time.monotonic(), 0.0))

    def _branch(self, port: int) -> None:
        """Have processes of this host ask the store for the nodes, if there are many."""
        if self._branches is not None:
            self._branches.close()
        try:
            self._branches = Branches(_HERE, port, needed(self._config.nodes))
        except OSError as error:  # all nodes ask it themselves
            logger.warning('the store has no branches: %s', error)
            return
        if self._branches.ports:
            announce(TCPStore(_HERE, port, is_master=False), self._branches.ports)

    # Agents

    def _ask_for_agent(self, node: Node) -> None:
        try:
            node.begin(self._start_step(node.host, self._address))
        except OSError as error:  # no process left on this host, say
            node.cannot_begin(f'its step cannot be started: {error}')

    def _links(self) -> list[Link[messages.FromAgent]]:
        links = [node.link for node in self._nodes.values()]
        return [link for link in links if link is not None]

    def _arrivals(self) -> None:
        assert self._listener is not None
        for here, link in self._listener.take():
            node = self._nodes.get(here.host)
            if node is None:
                link.close()
                continue
            if node.link is not None:
                node.lose('it has a new agent')
            job = messages.program(self._config, default_variables(self._config))
            try:
                link.send(job)  # before the heartbeats know the link: it is to come first
            except OSError:
                link.close()  # its step ends, too
                continue
            self._met = True
            node.connected(link)
            self._report(NodeReady(here.host))
            if here.trouble:
                self._note(node, here.trouble, here.usable)

    def _act(self, node: Node, message: messages.FromAgent) -> None:
        match message:
            case messages.Happened(line):
                for event in decode(line):
                    self._report(event)
            case messages.DevicesFail(trouble, usable):
                self._note(node, trouble, usable)
            case _:
                self._children.act(message)

    def _note(self, node: Node, trouble: str, usable: bool) -> None:
        """Something is wrong with a device of a node; its ranks go elsewhere if that is lost."""
        self._report(DevicesFailing(node.host, trouble, usable))
        if usable:
            node.worn = True
        else:
            node.give_up(trouble)

    def _lost(self, node: Node, why: str) -> None:
        self._report(NodeLost(node.host, node.seat, why))
        if node.seat is not None:
            self._vacated = time.monotonic()
        self._children.lose(node, node.host)

    def _missed(self, node: Node, why: str) -> None:
        self._report(NodeMissing(node.host, why))

    # Seats

    def _are_enough(self) -> bool:
        """All hosts are there; or after a while those that suffice."""
        coming = [node for node in self._nodes.values() if node.is_coming]
        there = [node for node in self._nodes.values() if node.is_spare]
        enough = len(there) >= self._config.nodes
        return not coming or (enough and time.monotonic() > self._began + _GATHER_S)

    def _take_seats(self) -> None:
        taken = {node.seat for node in self._nodes.values()}
        for seat in range(self._config.nodes):
            if seat not in taken and not self._take(seat):
                self._look_for_another(seat)
                break
        self._start_waiting()
        for node in self._nodes.values():
            if node.is_spare and not node.is_hot:
                node.is_hot = True
                node.send(messages.KeepSpares(self._config.workers_per_node))

    def _take(self, seat: int) -> bool:
        spares = [node for node in self._nodes.values() if node.is_spare]
        for node in sorted(spares, key=lambda spare: spare.worn):  # the sound ones first
            node.seat = seat
            self._report(NodeSeated(node.host, seat))
            if node.is_hot:
                node.send(messages.KeepSpares(0))
            return True
        return False

    def _look_for_another(self, seat: int) -> None:
        """No spare is there: perhaps one is coming, or only the agent of a host was lost."""
        absent = [node for node in self._nodes.values() if node.link is None]
        for node in absent:
            if not (node.is_coming or node.broken) and node.tried < self._vacated:
                self._ask_for_agent(node)
        if any(node.is_coming for node in absent):
            return
        reasons = ', '.join(f'{node.host}: {node.why}' for node in absent)
        message = f'node {seat} of the job has no host, and no spare node is left ({reasons})'
        raise NoNodeLeft(message) if self._met else LaunchError(message)

    def _start_waiting(self) -> None:
        seated = {node.seat: node for node in self._nodes.values()}
        for child in self._children:
            node = seated.get(self._config.node_of(child.order.rank))
            # Its agent may be found lost by what another child was to be told.
            if node is not None and node.link is not None and child.waits_for_node:
                child.start_on(node)
