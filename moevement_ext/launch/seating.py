# SPDX-License-Identifier: Apache-2.0
"""Which host works for each seat of the job.

A *seat* is a node slot of the job: its number (`GROUP_RANK`) and its ranks. A host has at most one
seat of its own. If there are fewer hosts than seats, the ranks of the others are *guests*: more
processes on hosts that have a seat. The map decides nothing but where a process runs: groups,
state, data and random numbers belong to the rank, so a job with guests computes the same bits.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class HeldWindow(NamedTuple):
    """A committed window of a rank, or the stub of one, in the memory of a host."""

    holder: int
    """Rank that keeps it."""
    owner: int
    """Rank whose state it is."""
    name: str


class Seating:
    """Hosts of all seats. The supervisor's thread uses this.

    Args:
        seats: number of seats.
        ranks_of_seat: ranks of each seat, which are consecutive.

    Attributes:
        seats: by host; the first is its own, the others are those of guests.
        keepers: for each rank, the ranks that keep its windows, itself included; empty: unknown.
    """

    def __init__(self, seats: int, ranks_of_seat: int) -> None:
        self.seats: dict[str, list[int]] = {}
        self.keepers: Sequence[Collection[int]] = ()
        self._count = seats
        self._ranks = ranks_of_seat
        self._former: dict[str, int] = {}

    def host_of(self, seat: int) -> str | None:
        return next((host for host, seats in self.seats.items() if seat in seats), None)

    def without_host(self) -> list[int]:
        taken = {seat for seats in self.seats.values() for seat in seats}
        return [seat for seat in range(self._count) if seat not in taken]

    @property
    def guests(self) -> dict[int, str]:
        """Host of each seat whose ranks are guests."""
        return {seat: host for host, seats in self.seats.items() for seat in seats[1:]}

    def take(self, seat: int, host: str) -> None:
        """Move a seat to `host`, from its present host if it has one."""
        self._leave(seat)
        self.seats.setdefault(host, []).append(seat)
        self._former[host] = self.seats[host][0]

    def lose(self, host: str) -> list[int]:
        """The seats of a lost host, which have no host now."""
        return self.seats.pop(host, [])

    def choices(self, seat: int, hosts: Iterable[str]) -> list[str]:
        """`hosts` from the best for a seat to the worst.

        First those where the ranks do not share their host with all copies of their windows, and
        with no windows of which they keep the only copy; then those with the fewest seats.
        """
        return sorted(hosts, key=lambda host: (self.exposed(seat, host), len(self._at(host))))

    def exposed(self, seat: int, host: str) -> int:
        """Ranks with windows that one more host takes with it, if it is `host` with this seat."""
        return sum(
            len(ranks) > 1 and {self._with(rank, seat, host) for rank in ranks} == {host}
            for ranks in self.keepers
            if any(self._seat_of(rank) == seat for rank in ranks)
        )

    def homecoming(self, host: str) -> int | None:
        """Seat of guests that a host without a seat takes: the one it had, if possible."""
        guests = self.guests
        return min(
            guests,
            key=lambda seat: (seat != self._former.get(host), -len(self.seats[guests[seat]])),
            default=None,
        )

    def windows_without(self, seat: int, held: Iterable[HeldWindow]) -> bool:
        """True if the job has a window without the memory of this seat's ranks."""
        owners: dict[str, set[int]] = {}
        for window in held:
            if self._seat_of(window.holder) != seat:
                owners.setdefault(window.name, set()).add(window.owner)
        return any(len(found) == self._count * self._ranks for found in owners.values())

    def describe(self) -> str:
        """For people: the number of nodes, and where guests are; empty without guests."""
        places = [f'node {seat} is a guest of {host}' for seat, host in sorted(self.guests.items())]
        return '; '.join([f'{len(self.seats)} of {self._count} nodes', *places]) if places else ''

    def _at(self, host: str) -> list[int]:
        return self.seats.get(host, [])

    def _leave(self, seat: int) -> None:
        host = self.host_of(seat)
        if host is not None:
            self.seats[host].remove(seat)
            if not self.seats[host]:
                del self.seats[host]

    def _seat_of(self, rank: int) -> int:
        return rank // self._ranks

    def _with(self, rank: int, seat: int, host: str) -> str | None:
        """Host of a rank once `host` has this seat."""
        own = self._seat_of(rank)
        return host if own == seat else self.host_of(own)
