# SPDX-License-Identifier: Apache-2.0
"""Moves ranks of a lost host to hosts that have a seat, and back once a host is free.

A host takes guests only if it has room for all that they keep there, in bytes. Guests move to a
free host only while the memory of the other ranks has a window of the whole job: what they keep is
deleted, and their recovery needs no more than that of any lost rank.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moevement_ext.events import Event
from moevement_ext.launch import messages
from moevement_ext.launch.launch_config import GUESTS, LaunchConfig
from moevement_ext.launch.launcher_events import GuestsSeated, NodeLost, NodeSeated
from moevement_ext.launch.remote import Children, Commands
from moevement_ext.launch.seating import Seating
from moevement_ext.memory.reservation import bytes_in, owners_in

_TO_ANSWER_S = 10.0
_INSPECT_AGAIN_S = 1.0


@dataclass(eq=False)
class Guests:
    """Seats of the job, and the moves of their ranks. The supervisor's thread uses this.

    Args:
        config: of the job; without guests a seat is only taken by a host without one.
        children: all workers.
        nodes: connection to each host.
        report: called with moves.
        devices: indices of the GPUs that ranks use on a host with this own seat.
    """

    _config: LaunchConfig
    _children: Children
    _nodes: Mapping[str, Commands]
    _report: Callable[[Event], None]
    _devices: Callable[[int], list[int]]

    def __post_init__(self) -> None:
        self.seating = Seating(self._config.nodes, self._config.workers_per_node)
        self.usable: Sequence[str] = ()  # hosts that can work for the job
        self._memory: Path | None = None
        self._bytes: list[int] = []
        self._seen: dict[str, messages.MemorySeen] = {}
        self._refused: dict[tuple[int, str], str] = {}
        self._inspect_at = 0.0

    def hold_windows(self) -> bool:
        """True if a host has windows of the run, as a finished job has freed them."""
        return self._memory is not None and any(self._inspect(one).windows for one in self.usable)

    def learn(self, memory: Path, files: Sequence[bytes]) -> None:
        """Take over the directory of the run, and the list of each rank's files there."""
        self._memory = memory
        self._bytes = [bytes_in(one) for one in files]
        keepers = [{rank} for rank in range(len(files))]
        for holder, of_holder in enumerate(files):
            for owner in owners_in(of_holder):
                keepers[owner].add(holder)
        self.seating.keepers = keepers

    def on_memory_seen(self, seen: messages.MemorySeen) -> None:
        self._seen[seen.node] = seen

    def lose(self, host: str, why: str) -> None:
        seats = self.seating.lose(host)
        self.usable = [one for one in self.usable if one != host]
        for seat in seats or (None,):
            self._report(NodeLost(host, seat, why))
        self._seen[host] = messages.MemorySeen(host, 'it is lost')
        self._inspect_at = 0.0
        self._refused.clear()

    def take(self, seat: int) -> bool:
        """Let a usable host take a seat; False if none can."""
        for host in self.seating.choices(seat, self.usable):
            if host not in self.seating.seats:
                self.seating.take(seat, host)
                self._report(NodeSeated(host, seat))
                return True
            if self._config.when_no_spare == GUESTS and self._has_room(seat, host):
                exposed = self.seating.exposed(seat, host)
                self.seating.take(seat, host)
                self._report(GuestsSeated(host, seat, self.seating.describe(), exposed))
                return True
        return False

    def refusals(self, seat: int) -> str:
        """Why no host takes the ranks of a seat as guests; empty if none was asked."""
        found = [f'{host}: {why}' for (of, host), why in self._refused.items() if of == seat]
        return f'; no guests: {", ".join(found)}' if found else ''

    def bring_home(self, host: str) -> bool:
        """Let a free host take the seat of guests, if any, once they can leave; True if it does.

        Their processes are killed, and their memory on the other host is deleted.
        """
        seat = self.seating.homecoming(host)
        if seat is None or self._memory is None or time.monotonic() < self._inspect_at:
            return False
        self._inspect_at = time.monotonic() + _INSPECT_AGAIN_S
        held = [one for name in [*self.seating.seats] for one in self._inspect(name).windows]
        former = self.seating.guests.get(seat)
        if former is None or not self.seating.windows_without(seat, held):
            return False
        self.seating.take(seat, host)
        self._report(NodeSeated(host, seat))
        ranks = self._config.ranks_of(seat)
        for child in self._children:
            if child.order.rank in ranks and child.node is self._nodes[former]:
                child.moves_to = host
                child.signal(signal.SIGKILL)
        place = (former, str(self._memory.parent), self._memory.name)
        self._nodes[former].send(messages.Vacate(*place, list(ranks)))
        return True

    def _has_room(self, seat: int, host: str) -> bool:
        if time.monotonic() < self._inspect_at and (seat, host) in self._refused:
            return False
        seats = [seat, *self.seating.seats[host]]
        ranks = [rank for one in seats for rank in self._config.ranks_of(one)]
        nbytes = {rank: count for rank, count in enumerate(self._bytes) if rank in ranks}
        trouble = self._inspect(host, nbytes, self._devices(seats[1])).trouble
        self._inspect_at = time.monotonic() + _INSPECT_AGAIN_S
        if trouble:
            self._refused[seat, host] = trouble
        return not trouble

    def _inspect(
        self, host: str, nbytes: Mapping[int, int] | None = None, devices: Sequence[int] = ()
    ) -> messages.MemorySeen:
        """Ask a host; one that does not answer in time has no room and no windows."""
        self._seen.pop(host, None)
        root, run = ('', '') if self._memory is None else (self._memory.parent, self._memory.name)
        shared = len(self.seating.seats.get(host, ()))
        asked = messages.LookAtMemory(host, str(root), run, dict(nbytes or {}), [*devices], shared)
        node = self._nodes[host]
        node.send(asked)
        deadline = time.monotonic() + _TO_ANSWER_S
        while host not in self._seen and time.monotonic() < deadline:
            node.handle_message()
        return self._seen.get(host) or messages.MemorySeen(host, 'it does not answer')
