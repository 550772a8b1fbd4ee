# SPDX-License-Identifier: Apache-2.0
"""Which host works for each seat of the job.

A *seat* is a node slot of the job: its number (`GROUP_RANK`) and its ranks. A host has at most one
seat of its own. If there are fewer hosts than seats, the ranks of the others are *guests*: more
processes on hosts that have a seat. The map decides nothing but where a process runs: groups,
state, data and random numbers belong to the rank, so a job with guests computes the same bits.
"""

from collections.abc import Collection, Iterable, Sequence


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

    def resize(self, seats: int) -> None:
        """Let the job have that many seats, all empty."""
        self._count = seats
        self.seats.clear()
        self.keepers = ()

    @property
    def hosts(self) -> dict[int, str]:
        """Host of each seat that has one."""
        return {seat: host for host, seats in self.seats.items() for seat in seats}

    @property
    def empty(self) -> list[int]:
        """Seats without a host."""
        return sorted(set(range(self._count)) - self.hosts.keys())

    @property
    def guests(self) -> dict[int, str]:
        """Host of each seat whose ranks are guests."""
        return {seat: host for host, seats in self.seats.items() for seat in seats[1:]}

    def take(self, seat: int, host: str) -> None:
        """Move a seat to `host`, from its present host if it has one."""
        former = self.hosts.get(seat)
        if former is not None:
            self.seats[former].remove(seat)
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
        kept = self._kept_with(seat)

        def price(host: str) -> tuple[int, int]:
            return sum(found <= {host} for found in kept), len(self.seats.get(host, ()))

        return sorted(hosts, key=price)

    def exposed(self, seat: int, host: str) -> int:
        """Ranks whose windows are all lost with `host`, if it has this seat."""
        return sum(found <= {host} for found in self._kept_with(seat))

    def homecoming(self, host: str) -> int | None:
        """Seat of guests that a host without a seat takes: the one it had, if possible."""
        guests = self.guests
        return min(
            guests,
            key=lambda seat: (seat != self._former.get(host), -len(self.seats[guests[seat]])),
            default=None,
        )

    def windows_without(self, seat: int, held: Iterable[tuple[int, int, str]]) -> bool:
        """True if the job has a window without the memory of this seat's ranks.

        `held` has holder, owner and name of each committed window, or stub of one.
        """
        owners: dict[str, set[int]] = {}
        for holder, owner, name in held:
            if self._seat_of(holder) != seat:
                owners.setdefault(name, set()).add(owner)
        return any(len(found) == self._count * self._ranks for found in owners.values())

    def describe(self) -> str:
        """For people: the number of nodes, and where guests are; empty without guests."""
        places = [f'node {seat} is a guest of {host}' for seat, host in sorted(self.guests.items())]
        return '; '.join([f'{len(self.seats)} of {self._count} nodes', *places]) if places else ''

    def _kept_with(self, seat: int) -> list[set[str | None]]:
        """Other hosts with the windows that ranks of this seat keep, where other seats do, too."""
        hosts = self.hosts
        seats = [{self._seat_of(rank) for rank in ranks} for ranks in self.keepers]
        return [
            {hosts.get(other) for other in found - {seat}}
            for found in seats
            if len(found) > 1 and seat in found
        ]

    def _seat_of(self, rank: int) -> int:
        return rank // self._ranks
