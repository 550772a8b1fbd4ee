# SPDX-License-Identifier: Apache-2.0
"""Reads headers and ranges of another layout's windows, here or from ranks that have them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import batched

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory.shelf import Part, Shelf
from moevement_ext.memory.window.refused import CorruptWindow, RefusedWindow, UnreadableWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.reshard.index import Portion
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient

logger = logger_of(__name__)

# Ranges of one request.
_MAX_RANGES = 4096

Place = tuple[Portion, memoryview]
"""A piece, and the destination of its bytes."""


class Fetcher:
    """Fetches from one window of another layout. One thread uses it.

    `shelf` has the windows that `rank`, this one, can read itself; `holders` are the ranks that can
    read the part, by owner; `client` makes a client of another rank's server. `local` and `remote`
    are the bytes that were read here, and from other ranks.
    """

    def __init__(
        self,
        rank: int,
        shelf: Shelf,
        holders: Mapping[int, Sequence[tuple[int, Part]]],
        client: Callable[[int], ReplicaClient],
    ) -> None:
        self._rank = rank
        self._shelf = shelf
        self._holders = holders
        self._client = client
        self._clients: dict[int, ReplicaClient] = {}
        self.local = self.remote = 0

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def distance(self, owner: int) -> int:
        """0 for parts readable here; for others the distance of rank numbers, to spread load."""
        return 0 if self._sees(owner) else 1 + (owner - self._rank) % (len(self._holders) + 1)

    def headers(self, owner: int) -> list[SlotHeader]:
        """Headers of an owner's part, slot 0 first; errors as `fetch`."""

        def read(number: int, part: Part) -> list[SlotHeader]:
            if number == self._rank:
                return self._shelf.headers(part)
            return self._connected(number).fetch_part(part)

        return self._from_any(owner, 'the part', read)

    def fetch(self, owner: int, slot: int, places: Sequence[Place]) -> None:
        """Fill places with pieces of one owner's records.

        Raises:
            CorruptWindow: every copy is damaged.
            UnreadableWindow, PeerLost, HostMemoryError: a holder may have an undamaged copy.
        """

        def read(number: int, part: Part) -> None:
            if number == self._rank:
                self._read(part, slot, places)
            else:
                self._receive(number, part, slot, places)

        self._from_any(owner, f'slot {slot}', read)

    def _from_any[Read](self, owner: int, what: str, read: Callable[[int, Part], Read]) -> Read:
        passing: UnreadableWindow | PeerLost | HostMemoryError | None = None
        for number, part in self._sources(owner):
            try:
                return read(number, part)
            except (RefusedWindow, PeerRefused, PeerLost, HostMemoryError) as error:
                said = 'refused: part of rank %d of another layout, from rank %d: %s'
                logger.warning(said, owner, number, error)
                if isinstance(error, UnreadableWindow | PeerLost | HostMemoryError):
                    passing = error
        if passing is not None:
            raise passing
        raise CorruptWindow(f'{what} of rank {owner} cannot be read anywhere')

    def _read(self, part: Part, slot: int, places: Sequence[Place]) -> None:
        for piece, view in places:
            view[:] = self._shelf.read(part, slot, piece.record)[piece.begin : piece.end]
            self.local += len(view)

    def _receive(self, number: int, part: Part, slot: int, places: Sequence[Place]) -> None:
        client = self._connected(number)
        for some in batched(places, _MAX_RANGES):
            ranges = [(piece.record, piece.begin, piece.end) for piece, _ in some]
            views = [view for _, view in some]
            client.fetch_ranges(part, slot, ranges, views)
            self.remote += sum(map(len, views))

    def _sources(self, owner: int) -> Iterator[tuple[int, Part]]:
        """Holders of an owner's part: memory before disk, this rank first, then spread."""
        held = self._holders.get(owner, ())
        count = 1 + max((number for number, _ in held), default=0)
        yield from sorted(
            held,
            key=lambda one: (
                one[1].on_disk,
                one[0] != self._rank,
                (one[0] - self._rank) % count,
            ),
        )

    def _sees(self, owner: int) -> bool:
        return any(
            number == self._rank and not part.on_disk for number, part in self._holders[owner]
        )

    def _connected(self, number: int) -> ReplicaClient:
        if number not in self._clients:
            self._clients[number] = self._client(number)
        return self._clients[number]
