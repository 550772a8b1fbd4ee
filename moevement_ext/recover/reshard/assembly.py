# SPDX-License-Identifier: Apache-2.0
"""Assembles the windows of another layout for this one. Every step is collective."""

import time
from dataclasses import dataclass

from moevement_ext.capture.layout import Operators
from moevement_ext.errors import HostMemoryError, UserError
from moevement_ext.events import Resharded
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.shelf import Shelf
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import patiently
from moevement_ext.memory.window.refusal import CorruptWindow, RefusedWindow, UnreadableWindow
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.reshard.found import Candidate, Elsewhere, require_exact
from moevement_ext.recover.reshard.resharded import Fetcher, ReshardedWindow, resharded
from moevement_ext.recover.sources import VerifiedWindow, make_room
from moevement_ext.recover.trainer import Resharding
from moevement_ext.replicate.client import PeerLost, PeerRefused
from moevement_ext.replicate.host_memory import HostMemory

logger = logger_of(__name__)

# Tells the other ranks that no layout could go on from the window; other reasons are texts.
_DAMAGED = 'damaged'


@dataclass(eq=False)
class Assembly:
    """Assembles windows of other layouts for this layout. Training thread.

    `shelf` has the other layouts that this rank can read, `elsewhere` those of all ranks;
    `resharding` belongs to the trainer; `history` begins with this start.
    """

    _rank: Rank
    _shelf: Shelf
    _elsewhere: Elsewhere
    _memory: HostMemory
    _operators: Operators
    _resharding: Resharding
    _history: str

    def obtain(self, newer_than: int = -1) -> Conversion | None:
        """The newest window, dense after `newer_than`, that every rank could assemble. Collective.

        None: recovery continues with the next tier, as these windows are damaged or given up.
        Raises `UserError` if this layout cannot, or must not, continue from them.
        """
        self._memory.server.serve_shelf(self._shelf)
        self._rank.exchange('shelves', b'')  # all serve theirs now
        for number, candidate in enumerate(self._elsewhere.candidates):
            if candidate.window.dense_at <= newer_than:
                continue
            self._require(candidate)
            file, reason = self._resharded(candidate)
            answers = self._rank.exchange(f'resharded/{number}', reason.encode(errors='replace'))
            reasons = [reason.decode() for reason in answers if reason]
            if file is not None and not reasons:
                self._memory.windows.persisted(file.required_name())
                self._memory.windows.discard_after(candidate.window.start)
                return Conversion(VerifiedWindow(file), str(candidate.layout))
            if file is not None:
                self._memory.windows.discard(file.required_name())
            if _DAMAGED not in reasons and not self._rank.config.forget:
                raise UserError(_not_assembled(candidate, reasons[0]))
            logger.warning('window %d of %s is not whole', candidate.window.start, candidate.layout)
        return None

    def _require(self, candidate: Candidate) -> None:
        if self._rank.config.elastic_exact:
            require_exact(candidate, self._rank.world_size)
        try:
            self._resharding.refuse(candidate.layout)
        except RefusedWindow as refusal:
            raise UserError(f'--sparse-ckpt-elastic: {refusal}') from refusal
        if self._rank.number == self._rank.world_size - 1:
            print(self._line(candidate), flush=True)

    def _line(self, candidate: Candidate) -> str:
        """Log line, printed in advance, about the consequences of continuing from a window."""
        placed, window = self._rank.identity.placed, candidate.window
        assert placed is not None
        exact = f'bit for bit what this layout computes from iteration {window.dense_at}'
        if window.length > 1:
            exact = (
                f'iterations {window.start + 1} to {window.dense_at} are computed in this layout: '
                'equal up to rounding and random numbers'
            )
        return (
            f' sparse ckpt | window {window.start} of {candidate.layout} goes on in '
            f'{placed.layout} | {exact} | {self._resharding.kept(candidate.layout)} |'
        )

    def _resharded(self, candidate: Candidate) -> tuple[WindowFile | None, str]:
        """This rank's part, committed in its memory, or the reason why there is none."""

        def read() -> WindowFile:
            try:
                return self._assembled(candidate)
            except PeerLost as lost:  # all ranks are new: only a connection is lost
                raise UnreadableWindow(str(lost)) from lost

        try:
            return patiently(read), ''
        except (RefusedWindow, HostMemoryError, PeerRefused) as error:
            logger.warning(
                'refused: window %d of %s: %s', candidate.window.start, candidate.run, error
            )
            return None, _DAMAGED if isinstance(error, CorruptWindow) else str(error)

    def _assembled(self, candidate: Candidate) -> WindowFile:
        began = time.perf_counter()
        fetcher = Fetcher(self._rank.number, self._shelf, candidate.holders, self._memory.client)
        own = self._operators.slices.keys()
        wanted = [owner for owner, held in candidate.operators.items() if held & own]
        identity = self._rank.identity
        try:
            window = ReshardedWindow(
                identity,
                self._operators.slices,
                self._resharding,
                fetcher,
                candidate.seats,
                wanted,
                resharded(candidate.window, identity.topology, self._history),
            )
            make_room(self._memory.windows, window.window, [])
            file = self._memory.receive(window.window, window.write)
        finally:
            fetcher.close()
        self._rank.events.emit(
            Resharded(
                start=candidate.window.start,
                dense_at=candidate.window.dense_at,
                was=str(candidate.layout),
                local_bytes=fetcher.local,
                remote_bytes=fetcher.remote,
                seconds=round(time.perf_counter() - began, 3),
            )
        )
        return file


def _not_assembled(candidate: Candidate, reason: str) -> str:
    return (
        f'--sparse-ckpt-elastic: window {candidate.window.start} of {candidate.layout} is there, '
        f'but this start cannot go on from it: {reason}. Remove that cause and start again, or '
        'start that layout; --sparse-ckpt-forget goes on without the window, and deletes it.'
    )
