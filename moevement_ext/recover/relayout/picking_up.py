# SPDX-License-Identifier: Apache-2.0
"""Assembles the windows of another layout for this one. Every step is collective."""

import logging
import time

from moevement_ext.capture.operators import Operators
from moevement_ext.capture.relaying import Relaying
from moevement_ext.errors import HostMemoryError, UserError
from moevement_ext.events import Relaid
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.shelf import Shelf
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.placed import Placed
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.relayout import surplus
from moevement_ext.recover.relayout.fetching import Fetcher
from moevement_ext.recover.relayout.found import (
    Candidate,
    Elsewhere,
    require_exact,
)
from moevement_ext.recover.relayout.relaid import RelaidWindow
from moevement_ext.recover.sources import VerifiedWindow, make_room
from moevement_ext.recover.whole_job import Source
from moevement_ext.replicate.client import PeerLost, ShelfClient
from moevement_ext.replicate.host_memory import HostMemory

logger = logging.getLogger(__name__)

_FAILURES = (RefusedWindow, HostMemoryError, PeerLost)


class PickingUp:
    """Assembles windows of other layouts for this layout. Training thread.

    `shelf` has the other layouts that this rank can read, `elsewhere` those of all ranks;
    `relaying` belongs to the trainer.
    """

    def __init__(
        self,
        rank: Rank,
        shelf: Shelf,
        elsewhere: Elsewhere,
        memory: HostMemory,
        operators: Operators,
        relaying: Relaying,
    ) -> None:
        self._rank = rank
        self._shelf = shelf
        self._elsewhere = elsewhere
        self._memory = memory
        self._operators = operators
        self._relaying = relaying

    def obtain(self, newer_than: int = -1) -> Source | None:
        """The newest window, dense after `newer_than`, that every rank could assemble. Collective.

        None: recovery continues with the next tier. Raises `UserError` if this layout
        cannot, or must not, continue from these windows.
        """
        self._memory.server.serve_shelf(self._shelf)
        self._rank.exchange('shelves', b'')  # all serve theirs now
        for number, candidate in enumerate(self._elsewhere.candidates):
            if candidate.window.dense_at <= newer_than:
                continue
            self._require(candidate)
            file = self._relaid(candidate)
            if self._rank.exchange.all_agree(f'relaid/{number}', file is not None):
                assert file is not None
                self._memory.windows.persisted(file.required_name())
                self._memory.windows.discard_after(candidate.window.start)
                return Source(Conversion(VerifiedWindow(file)), str(candidate.layout))
            logger.warning('window %d of %s is not whole', candidate.window.start, candidate.layout)
        return None

    def _require(self, candidate: Candidate) -> None:
        if self._rank.config.elastic_exact:
            require_exact(candidate, surplus.started(self._rank.world_size))
        try:
            self._relaying.refuse(candidate.layout)
        except RefusedWindow as refusal:
            raise UserError(f'--sparse-ckpt-elastic: {refusal}') from refusal
        if self._rank.number == self._rank.world_size - 1:
            print(self._line(candidate), flush=True)

    def _line(self, candidate: Candidate) -> str:
        """Log line about the consequences of continuing from a window, written before."""
        placed, window = self._rank.identity.placed, candidate.window
        assert isinstance(placed, Placed)
        exact = f'bit for bit what this layout computes from iteration {window.dense_at}'
        if window.length > 1:
            exact = (
                f'iterations {window.start + 1} to {window.dense_at} are computed in this layout: '
                'equal up to rounding'
            )
        return (
            f' sparse ckpt | window {window.start} of {candidate.layout} goes on in '
            f'{placed.layout} | {exact} | {self._relaying.kept(candidate.layout)} |'
        )

    def _client(self, number: int) -> ShelfClient:
        """Make a client of another rank; surplus ranks are numbered after training ranks."""
        beyond = number - self._rank.world_size
        if beyond < 0:
            return self._memory.shelf_client(number)
        return self._elsewhere.beside.client(beyond)

    def _relaid(self, candidate: Candidate) -> WindowFile | None:
        """This rank's part, committed in its memory; None if no undamaged copy exists."""
        began = time.perf_counter()
        fetcher = Fetcher(self._rank.number, self._shelf, candidate.holders, self._client)
        own = self._operators.slices.keys()
        wanted = [owner for owner, held in candidate.operators.items() if held & own]
        try:
            relaid = RelaidWindow(
                self._rank.identity,
                self._operators.slices,
                self._relaying,
                fetcher,
                candidate.seats,
                wanted,
                candidate.window,
            )
            windows = self._memory.windows
            windows.discard(relaid.window.name)  # of an earlier start that did not come further
            make_room(windows, relaid.window, [])
            file = self._memory.receive(relaid.window, relaid.write)
        except _FAILURES as error:
            logger.warning(
                'refused: window %d of %s: %s', candidate.window.start, candidate.run, error
            )
            return None
        finally:
            fetcher.close()
        self._rank.events.emit(
            Relaid(
                start=candidate.window.start,
                dense_at=candidate.window.dense_at,
                was=str(candidate.layout),
                local_bytes=fetcher.local,
                remote_bytes=fetcher.remote,
                seconds=round(time.perf_counter() - began, 3),
            )
        )
        return file
