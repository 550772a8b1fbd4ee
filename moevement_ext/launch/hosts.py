# SPDX-License-Identifier: Apache-2.0
"""Starts workers on the nodes of an allocation, and moves a lost node's ranks to a spare node.

Each seat (`seating`) is assigned to a host. The other hosts are spares, with hot spares for all
workers of a seat; a host in a seat has hot spares for its own workers that die. When a host is
lost, a spare host takes its seat at once, or with `--when-no-spare guests` a host that has a seat.
If Slurm leaves the lost host in the allocation and it answers again, it becomes a spare, to which
guests move. A host with an unusable device counts as lost for the rest of the job.

The connection to the agent shows that a host is lost: within a second if the host's processes die,
and after `SILENT_S` if the host falls silent. Slurm notices later, after `SlurmdTimeout` (by
default 5 minutes), and then the step on the lost host returns status 0.
"""

import itertools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path

from moevement_ext.coordinator.keeper import Keeper
from moevement_ext.errors import EXIT_WHOLE_JOB, LaunchError
from moevement_ext.events import Event, decode
from moevement_ext.launch import messages
from moevement_ext.launch.child import FdLoop
from moevement_ext.launch.environment import (
    default_variables,
    guest_variables,
    job_variables,
    rank_variables,
)
from moevement_ext.launch.guests import Guests
from moevement_ext.launch.launch_config import REQUEUE, LaunchConfig, StagedAction
from moevement_ext.launch.launcher_events import (
    DevicesFailing,
    NodeMissing,
    NodeReady,
    SpareEnded,
    SpareMissing,
    SpareReady,
)
from moevement_ext.launch.link import Address, Beats, Link, Listener
from moevement_ext.launch.node import Node, StartStep
from moevement_ext.launch.remote import Children, RemoteChild
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import sizes_in
from moevement_ext.replicate.secret import given_in, new_secret, of_coordinator, variables_of

_GATHER_S = 60.0
_CLOSING_S = 10.0


@dataclass(eq=False)
class SlurmStarter:
    """`Starter` of workers on other nodes; the first `hosts` take the seats, in this order.

    `start_step` starts the agent of a host; `loop` calls this object when an agent sends a
    message.
    """

    hosts: InitVar[Sequence[str]]
    _start_step: StartStep
    _config: LaunchConfig
    _loop: FdLoop
    _report: Callable[[Event], None]

    def __post_init__(self, hosts: Sequence[str]) -> None:
        config, report = self._config, self._report
        self._nodes = {
            host: Node(host, self._loop, self._act, self._lost, self._missed) for host in hosts
        }
        self._children = Children(report)
        own = list(range(config.workers_per_node))
        self.guests = Guests(config, self._children, self._nodes, report, lambda seat: own)
        self._seating = self.guests.seating
        self._away: dict[int, Node] = {}
        self.moves_ranks = config.when_no_spare != REQUEUE or len(self._nodes) > config.nodes
        self._program = messages.program(config, default_variables(config))
        self._secret = new_secret()
        self._keeper = Keeper('', of_coordinator(given_in(variables_of(self._secret))))
        self._listener: Listener | None = None
        self._address: Address | None = None
        self._beats: Beats | None = None
        self._variables: dict[str, str] = {}
        self._began = 0.0
        self._vacated = 0.0
        self._met = False
        self._gathered = False
        self._reserve: messages.Reserve | None = None

    def open(self, port: int, ranks: int) -> None:
        """Prepare for workers that use the store at `port`; the first call starts all agents."""
        host, at = socket.gethostname(), self._keeper.address[1]
        self._variables = job_variables(self._config, ranks, host, port, at)
        if self._listener is None:
            self._listener = Listener(self._secret)
            self._loop.watch(self._listener.fd, self._arrivals)
            self._address = Address(host, self._listener.port, self._secret)
            self._began = time.monotonic()
            self._beats = Beats(self._links)
            for node in self._nodes.values():
                self._ask_for_agent(node)

    def start(
        self, rank: int, restarts: int, on_iteration: Callable[[int], None] | None = None
    ) -> RemoteChild:
        """Start or restart a rank; its process starts once the rank's seat has a host."""
        own = rank_variables(self._config, rank, restarts)
        child = self._children.add(rank, restarts, {**self._variables, **own}, on_iteration)
        self._start_waiting()
        return child

    def reserve(self, memory: Path, files: Sequence[bytes]) -> None:
        self.guests.learn(memory, files)
        sizes = [sizes_in(of_rank) for of_rank in files]
        seats = itertools.batched(sizes, self._config.workers_per_node)
        largest = max((list(itertools.chain(*of_seat)) for of_seat in seats), key=sum)
        self._reserve = messages.Reserve(str(memory.parent), memory.name, largest)
        for node in self._spares():
            node.send(self._reserve)

    def spares_left(self) -> str:
        spare = [node.host for node in self._spares()]
        names = f' ({" ".join(spare)})' if spare else ''
        return '; '.join(filter(None, [f'{len(spare)} nodes{names}', self._seating.describe()]))

    def poll(self) -> None:
        """Handle lost nodes, free hosts, and agents that do not connect.

        Raises `LaunchError` if a seat is empty, and no host can take it now or later.
        """
        for node in self._nodes.values():
            node.poll()
        for child in [child for child in self._children if child.is_overdue]:
            child.give_up(f'its agent does not start rank {child.order.rank}')
        self.guests.usable = [node.host for node in self._nodes.values() if node.is_usable]
        self._gathered = self._gathered or self._are_enough()
        if self._gathered:
            self._take_seats()
        for node in self._nodes.values():
            if node.is_due:
                self._ask_for_agent(node)

    def lose_node(
        self, node: int, memory: Callable[[str], NodeStore], for_good: bool = False
    ) -> Path | None:
        host = next((one for one, seats in self._seating.seats.items() if seats[0] == node), None)
        if host is None:
            return None  # the node is already lost
        store = memory(host)
        self._nodes[host].send(messages.SimulateNodeLoss(host, str(store.root), store.run_id))
        if for_good:
            self._away[node] = self._nodes[host]
            self._away[node].broken = f'{StagedAction.LOSE_NODE} {node}'
        return store.path

    def return_node(self, node: int) -> None:
        host = self._away.pop(node, None)
        if host is not None:
            host.broken = ''
            self._ask_for_agent(host)

    def close(self) -> None:
        self._keeper.close()
        if self._listener is not None:
            self._listener.close()
        if self._beats is not None:
            self._beats.close()
        deadline = time.monotonic() + _CLOSING_S
        for node in self._nodes.values():
            node.disconnect()
        for node in self._nodes.values():
            node.close(max(deadline - time.monotonic(), 0.0))

    # Agents

    def _ask_for_agent(self, node: Node) -> None:
        assert self._address is not None
        try:
            node.begin(self._start_step(node.host, self._address))
        except OSError as error:  # such as the process limit of this host
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
            try:
                # Before the heartbeats use the link: `Program` must be first.
                link.send(self._program)
            except OSError:
                link.close()  # this ends the step, too
                continue
            self._met = True
            node.connected(link)
            self._report(NodeReady(here.host))
            if here.trouble:
                self._lose_devices(node, here.trouble)

    def _act(self, node: Node, message: messages.FromAgent) -> None:
        match message:
            case messages.Happened(line):
                for event in decode(line):
                    node.has_imported |= isinstance(event, SpareReady | SpareEnded | SpareMissing)
                    self._report(event)
            case messages.MemorySeen():
                self.guests.on_memory_seen(message)
            case messages.DevicesFail(trouble):
                self._lose_devices(node, trouble)
            case _:
                self._children.act(message)

    def _lose_devices(self, node: Node, trouble: str) -> None:
        self._report(DevicesFailing(node.host, trouble))
        node.give_up(trouble)

    def _lost(self, node: Node, why: str) -> None:
        if node.host in self._seating.seats:
            self._vacated = time.monotonic()
        self.guests.lose(node.host, why)
        self._children.lose(node, node.host)

    def _missed(self, node: Node, why: str) -> None:
        self._report(NodeMissing(node.host, why))

    # Seats

    def _spares(self) -> list[Node]:
        """Usable hosts without a seat."""
        usable = (node for node in self._nodes.values() if node.is_usable)
        return [node for node in usable if node.host not in self._seating.seats]

    def _are_enough(self) -> bool:
        coming = [node for node in self._nodes.values() if node.is_coming]
        enough = len(self._spares()) >= self._config.nodes
        return not coming or (enough and time.monotonic() > self._began + _GATHER_S)

    def _take_seats(self) -> None:
        for seat in self._seating.empty:
            if not self.guests.take(seat):
                self._request_another(seat)
                break
            self._keep_spares(self._seating.hosts[seat])
        self._start_waiting()
        for node in self._spares():
            if not node.is_hot:
                node.is_hot = True
                count = self._config.workers_per_node if self._config.importable else 0
                node.send(messages.KeepSpares(count))
                if self._reserve is not None:
                    node.send(self._reserve)
            elif node.has_imported or not self._config.importable:
                if self.guests.bring_home(node.host):
                    self._keep_spares(node.host)

    def _keep_spares(self, host: str) -> None:
        """Let a host that has taken a seat keep hot spares for its own workers only."""
        self._nodes[host].send(messages.KeepSpares(self._config.spares))

    def _request_another(self, seat: int) -> None:
        absent = [node for node in self._nodes.values() if node.link is None]
        for node in absent:
            if not (node.is_coming or node.broken) and node.tried < self._vacated:
                self._ask_for_agent(node)
        if any(node.is_coming for node in absent):
            return
        reasons = ', '.join(f'{node.host}: {node.why}' for node in absent)
        message = f'node {seat} of the job has no host, and no spare node is left ({reasons})'
        message += self.guests.refusals(seat)
        raise LaunchError(message, EXIT_WHOLE_JOB) if self._met else LaunchError(message)

    def _start_waiting(self) -> None:
        seated, guests = self._seating.hosts, self._seating.guests
        for child in self._children:
            seat = self._config.node_of(child.order.rank)
            node = self._nodes.get(seated.get(seat, ''))
            # An order to another child may just have shown that this node's agent is lost.
            if node is not None and node.link is not None and child.waits_for_node:
                child.start_on(node, guest_variables(seat) if seat in guests else {})
