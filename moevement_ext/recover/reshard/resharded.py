# SPDX-License-Identifier: Apache-2.0
"""Writes this rank's part of a window from the parts of all owners in another layout.

Headers and ranges of these are read here, or from ranks that have them.

The result equals a window captured by this rank: it has the rank's names, ranges and layout stamp.
So conversion, replication and further recoveries treat it like any other window.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched

import numpy as np
import xxhash

from moevement_ext import faults
from moevement_ext.capture.layout import OperatorSlices, SlotLayout
from moevement_ext.errors import HostMemoryError
from moevement_ext.faults import Phase
from moevement_ext.logger import logger_of
from moevement_ext.memory.shelf import Part, Shelf
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import History, RankIdentity, Window
from moevement_ext.memory.window.refusal import CorruptWindow, RefusedWindow, UnreadableWindow
from moevement_ext.memory.window.settings import Seat, encode
from moevement_ext.memory.window.slot import (
    Record,
    SlotContext,
    SlotHeader,
    align_up,
    decode_context,
    frame_bytes_bound,
)
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.protect.checkpointer import slot_header
from moevement_ext.recover.reshard.index import Division, Portion, SlotIndex, Wanted
from moevement_ext.recover.trainer import Resharding
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient

logger = logger_of(__name__)

# Ranges of one request.
_MAX_RANGES = 4096

Place = tuple[Portion, memoryview]
"""A piece, and the destination of its bytes."""


@dataclass(eq=False)
class Fetcher:
    """Fetches from one window of another layout. One thread uses it.

    `shelf` has the windows that `rank`, this one, can read itself; `holders` are the ranks that can
    read the part, by owner; `client` makes a client of another rank's server. `local` and `remote`
    are the bytes that were read here, and from other ranks.
    """

    _rank: int
    _shelf: Shelf
    _holders: Mapping[int, Sequence[tuple[int, Part]]]
    _client: Callable[[int], ReplicaClient]

    def __post_init__(self) -> None:
        self._clients: dict[int, ReplicaClient] = {}
        self.local = self.remote = 0

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def distance(self, owner: int) -> int:
        """0 for parts readable here; for others the distance of rank numbers, to spread load."""
        if any(one == self._rank and not part.on_disk for one, part in self._holders[owner]):
            return 0
        return 1 + (owner - self._rank) % (len(self._holders) + 1)

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
                text = 'refused: part of rank %d of another layout, from rank %d: %s'
                logger.warning(text, owner, number, error)
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
            key=lambda one: (one[1].on_disk, one[0] != self._rank, (one[0] - self._rank) % count),
        )

    def _connected(self, number: int) -> ReplicaClient:
        if number not in self._clients:
            self._clients[number] = self._client(number)
        return self._clients[number]


def resharded(window: Window, topology: str, history: str) -> Window:
    """The window in the layout `topology`, as a part of this start's history."""
    digest = xxhash.xxh3_64_hexdigest(f'{window.name.plan}/{topology}'.encode())
    return Window(History(history).window(window.start, digest), window.length)


@dataclass(eq=False)
class ReshardedWindow:
    """One rank's part of a window, assembled slot by slot.

    `identity`, `slices`, by operator, and `window` are this rank's; `fetcher` and `seats` belong to
    the other layout, of which the `wanted` owners have any of this rank's operators. Raises
    `RefusedWindow` if no copy of a header is readable.
    """

    _identity: RankIdentity
    _slices: Mapping[str, OperatorSlices]
    _resharding: Resharding
    _fetcher: Fetcher
    _seats: Mapping[int, Seat]
    _wanted: Collection[int]
    window: Window

    def __post_init__(self) -> None:
        assert self._identity.placed is not None  # without one no window is found
        self._seat = self._identity.placed.seat
        self._states = self._resharding.state_owners(self._seats)
        owners = sorted({*self._wanted, *self._states})
        self._headers = {owner: self._fetcher.headers(owner) for owner in owners}

    def write(self, file: WindowFile) -> None:
        """Write all slots into a file that was begun for `window`.

        Raises:
            RefusedWindow: no undamaged copy of some bytes exists; the message names them.
            FileTooSmall: the file is too small; nothing was written.
        """
        headers = [self._header(slot) for slot in range(self.window.length)]
        file.require(
            sum(
                align_up(header.payload_bytes) + align_up(frame_bytes_bound(header))
                for header in headers
            ),
            len(headers),
        )
        for header in headers:
            faults.at_iteration(header.iteration + 1)
            faults.point(Phase.RESHARD)
            self._fill(file.reserve_slot(header.slot, header.payload_bytes), header)
            file.seal_slot(header)

    def _header(self, slot: int) -> SlotHeader:
        context = self._context(slot)
        plan = WindowPlan((tuple(context.full), tuple(context.weights)))
        return slot_header(
            self._identity,
            self.window.name,
            slot,
            SlotLayout(plan, 0, self._slices),
            context,
            window=self.window.length,
            settings=b'' if slot else encode(self._identity.settings),
        )

    def _context(self, slot: int) -> SlotContext:
        """Context of a slot with this rank's operators, merged over all stages."""
        contexts = {
            owner: decode_context(headers[slot].context) for owner, headers in self._headers.items()
        }
        full = {name for context in contexts.values() for name in context.full}
        weights = {name for context in contexts.values() for name in context.weights}
        return SlotContext(
            [name for name in self._slices if name in full],
            [name for name in self._slices if name in weights - full],
            self._resharding.auxiliary_state(
                {owner: contexts[owner].state for owner in self._states}
            ),
        )

    def _fill(self, payload: np.ndarray, header: SlotHeader) -> None:
        index = SlotIndex(self._name_of, self._division_of)
        for headers in self._headers.values():
            index.add(headers[header.slot])
        places: dict[int, list[Place]] = {}
        kinds = (kind for held in self._slices.values() for kind in held)
        volatile = {(one.tensor, one.part) for kind in kinds for one in kind if one.volatile}
        view = memoryview(payload)
        for record in header.records:
            at = record.offset
            for need in self._needs(record, volatile):
                for piece in index.pieces(need, self._fetcher.distance):
                    begin = at + piece.at
                    place = view[begin : begin + piece.end - piece.begin]
                    places.setdefault(piece.owner, []).append((piece, place))
                at += need.nbytes
        for owner, wanted in places.items():
            self._fetcher.fetch(owner, header.slot, wanted)

    def _needs(self, record: Record, volatile: Collection[tuple[str, str]]) -> Iterator[Wanted]:
        """Ranges that make up a record, in ascending order."""
        name = self._resharding.name_of(record.operator, record.tensor, self._seat)
        varies = (record.tensor, record.part) in volatile
        size = record.nbytes // max(record.end - record.start, 1)
        for start, end in self._division_of(record, None).ranges(record.start, record.end):
            nbytes = size * (end - start)
            yield Wanted(name, record.part, record.dtype, start, end, nbytes, varies)

    def _name_of(self, operator: str, tensor: str, owner: int) -> str:
        return self._resharding.name_of(operator, tensor, self._seats[owner])

    def _division_of(self, record: Record, owner: int | None) -> Division:
        return self._resharding.division_of(record.operator, record.part, record.tensor, owner)
