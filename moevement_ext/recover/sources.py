# SPDX-License-Identifier: Apache-2.0
"""A window that is converted slot by slot while the rest of it is still fetched and verified.

Own copy first, then one holder of a replica after the other, then the own disk; every slot is
handed on only when its checksums are verified (paper section 3.3, streamed).
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from moevement_ext.errors import HostMemoryError, SparseCheckpointError
from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.sizing import GENERATIONS
from moevement_ext.memory.window.expected import Expected
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window, WindowName
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.inventory import holders
from moevement_ext.replicate.client import PeerLost, PeerRefused
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.interrupting import join_interrupted

logger = logging.getLogger(__name__)

Arrived = Callable[[WindowFile, SlotHeader], None]
"""Called with every slot that is verified."""

DISK = 'disk'
"""Name of the last source."""

TRIES = 3
"""So often a holder that does not answer is asked for a window."""
_FAILURES = (RefusedWindow, PeerLost, PeerRefused, HostMemoryError)


class HolderLost(RefusedWindow):
    """Nobody could deliver the window, and a holder did not answer: it may, when all meet again."""


class ArrivalStopped(SparseCheckpointError):
    """The window is not waited for any more."""


class SlotSource(Protocol):
    """A window to convert."""

    @property
    def name(self) -> WindowName:
        """Start and plan."""

    @property
    def window(self) -> int:
        """W: number of slots."""

    def slot(self, index: int) -> tuple[SlotHeader, Bytes]:
        """Verified header and payload of a slot, once they are here."""

    def file(self) -> WindowFile:
        """The whole window, committed in this rank's memory."""


class VerifiedWindow:
    """A window that is all here.

    Args:
        file: verified.
    """

    def __init__(self, file: WindowFile) -> None:
        assert file.name is not None
        self.name = file.name
        self.window = len(file.slots())
        self._file = file

    def slot(self, index: int) -> tuple[SlotHeader, Bytes]:
        """Header and payload of a slot."""
        return self._file.header(index), self._file.payload(index)

    def file(self) -> WindowFile:
        """The whole window."""
        return self._file


class Obtained(NamedTuple):
    """A window that is whole, verified and committed in this rank's memory."""

    file: WindowFile
    source: str
    """`own memory`, `rank <holder>` or `DISK`."""


def verified_window(
    memory: HostMemory,
    candidate: Window,
    inventories: Sequence[Sequence[HeldWindow]],
    identity: RankIdentity,
    arrived: Arrived = lambda file, header: None,
    before_next: Callable[[], None] = lambda: None,
) -> Obtained:
    """This rank's part of `candidate`, committed in its own memory and verified.

    Args:
        memory: of this rank.
        candidate: the window.
        inventories: what each rank's node holds, by rank.
        identity: of this rank in this run.
        arrived: called with the slots in ascending order; from the first again after a failure.
        before_next: called after a failure, before what was handed on may be overwritten.

    Raises:
        RefusedWindow: nobody has it whole and undamaged; the message has all reasons.
        HolderLost: the same, but a holder did not answer.
    """
    reasons, kind = [], RefusedWindow
    for where, obtain in _sources(memory, candidate, inventories, identity):
        try:
            return Obtained(obtain(arrived), where)
        except _FAILURES as error:
            logger.warning('refused: window %d from %s: %s', candidate.start, where, error)
            reasons.append(f'{where}: {error}')
            if isinstance(error, PeerLost):
                kind = HolderLost
            before_next()
    raise kind(f'window {candidate.start}: ' + ('; '.join(reasons) or 'no holder'))


def make_room(windows: OwnerWindows, wanted: Window, usable: Sequence[Window]) -> None:
    """Free a file for a window that is not here, if all hold others, as a node's that was away.

    First what is no candidate goes, then the oldest.

    Args:
        windows: of this rank.
        wanted: the window that may have to be fetched.
        usable: candidates for a recovery.
    """
    names = [candidate.name for candidate in usable]
    while len(held := [window.name for window in windows.committed()]) >= GENERATIONS:
        if wanted.name in held:
            return
        useless = [name for name in held if name not in names]
        windows.discard((useless or held)[-1])


def _sources(
    memory: HostMemory,
    candidate: Window,
    inventories: Sequence[Sequence[HeldWindow]],
    identity: RankIdentity,
) -> Iterator[tuple[str, Callable[[Arrived], WindowFile]]]:
    own = memory.windows.file(candidate.name)
    if own is not None:
        yield 'own memory', partial(_verify_own, own, identity)
        memory.windows.discard(candidate.name)  # it was refused
    for holder in holders(candidate, memory.rank, inventories):
        yield f'rank {holder}', partial(_fetch, memory, candidate, holder, identity)
    if memory.disk is not None and memory.disk.has(candidate.name):
        yield DISK, partial(_fetch_from_disk, memory, candidate, identity)


def _verify_own(file: WindowFile, identity: RankIdentity, arrived: Arrived) -> WindowFile:
    for header in file.verify_identity(Expected.of(identity)):
        file.verify_payloads([header])
        arrived(file, header)
    return file


def _fetch(
    memory: HostMemory, candidate: Window, holder: int, identity: RankIdentity, arrived: Arrived
) -> WindowFile:
    return memory.fetch(candidate, holder, _if_of(identity, arrived))


def _fetch_from_disk(
    memory: HostMemory, candidate: Window, identity: RankIdentity, arrived: Arrived
) -> WindowFile:
    return memory.fetch_from_disk(candidate, _if_of(identity, arrived))


def _if_of(identity: RankIdentity, arrived: Arrived) -> Arrived:
    """Refuses slots that this rank has not captured."""

    def received(file: WindowFile, header: SlotHeader) -> None:
        Expected.of(identity).check(header, file.path)
        arrived(file, header)

    return received


class ArrivingWindow:
    """Obtains and verifies this rank's part of a window on a thread of its own.

    One thread takes slots; any thread may call `close`.

    Args:
        memory: of this rank.
        candidate: the window.
        inventories: what each rank's node holds, by rank.
        identity: of this rank in this run.
    """

    def __init__(
        self,
        memory: HostMemory,
        candidate: Window,
        inventories: Sequence[Sequence[HeldWindow]],
        identity: RankIdentity,
    ) -> None:
        self.name = candidate.name
        self.window = candidate.length
        self._memory = memory
        self._slots: dict[int, tuple[SlotHeader, Bytes]] = {}
        self._file: WindowFile | None = None
        self._error: Exception | None = None
        self._awaited: Callable[[], bool] | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run,
            args=(candidate, inventories, identity),
            daemon=True,
            name='sparse-ckpt-window',
        )
        self._thread.start()

    def slot(self, index: int) -> tuple[SlotHeader, Bytes]:
        """Verified header and payload of a slot, once they are here; valid until the next call.

        Raises:
            RefusedWindow: nobody has the window whole and undamaged.
            ArrivalStopped: closed.
        """
        self._wait_for(lambda: index in self._slots)
        return self._slots[index]

    def file(self) -> WindowFile:
        """The whole window, committed in this rank's memory; errors as of `slot`."""
        self._wait_for(lambda: self._file is not None)
        assert self._file is not None
        return self._file

    def close(self) -> None:
        """End the thread and wake up whoever waits."""
        with self._changed:
            self._error = self._error or ArrivalStopped('the window is not waited for any more')
            self._changed.notify_all()
        join_interrupted(self._thread, self._memory.interrupt_fetch)

    def _wait_for(self, here: Callable[[], bool]) -> None:
        with self._changed:
            self._awaited = here
            self._changed.notify_all()
            self._changed.wait_for(lambda: here() or self._error is not None)
            self._awaited = None
            if not here():
                assert self._error is not None
                raise self._error

    def _run(
        self,
        candidate: Window,
        inventories: Sequence[Sequence[HeldWindow]],
        identity: RankIdentity,
    ) -> None:
        try:
            file, _ = verified_window(
                self._memory, candidate, inventories, identity, self._arrived, self._before_next
            )
        except Exception as error:  # whoever waits must learn of it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        with self._changed:
            self._file = file
            self._changed.notify_all()

    def _arrived(self, file: WindowFile, header: SlotHeader) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error
            self._slots.setdefault(header.slot, (header, file.payload(header.slot)))
            self._changed.notify_all()

    def _before_next(self) -> None:
        """What was taken may still be read, until the reader waits for another slot."""
        with self._changed:
            self._changed.wait_for(lambda: self._reader_is_idle() or self._error is not None)
            if self._error is not None:
                raise self._error

    def _reader_is_idle(self) -> bool:
        """It waits for what is not here yet; it may not have noticed that something has come."""
        return self._awaited is not None and not self._awaited()
