# SPDX-License-Identifier: Apache-2.0
"""Fetches a window slot by slot, so that its conversion starts before the last slot arrives.

Sources in order: the own copy, each replica holder, the own disk; or the disk alone, if the
strategy does not use host memory as a source. A slot is passed on only after its checksums are
verified (paper section 3.3, streamed).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.membership.report import NOWHERE
from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import GENERATIONS, Expected
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window
from moevement_ext.memory.window.refusal import RefusedWindow, UnreadableWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.inventory import holders
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReaderClosed
from moevement_ext.replicate.connection import join_interrupted
from moevement_ext.replicate.host_memory import HostMemory

logger = logger_of(__name__)

Arrived = Callable[[WindowFile, SlotHeader], None]

DISK = 'disk'

_PASSING = (UnreadableWindow, PeerLost, HostMemoryError)
_FAILURES = (RefusedWindow, PeerRefused, *_PASSING)


class VerifiedWindow:
    """A complete, verified window in memory."""

    def __init__(self, file: WindowFile) -> None:
        assert file.name is not None
        self.name = file.name
        self.window = len(file.slots())
        self._file = file

    def slot(self, index: int) -> tuple[SlotHeader, Bytes]:
        return self._file.header(index), self._file.payload(index)

    def file(self) -> WindowFile:
        return self._file


def verified_window(
    memory: HostMemory,
    candidate: Window,
    inventories: Sequence[Sequence[HeldWindow]],
    identity: RankIdentity,
    arrived: Arrived = lambda file, header: None,
    before_next: Callable[[], None] = lambda: None,
) -> tuple[WindowFile, str]:
    """Commit this rank's part of `candidate` in its own memory, and verify it.

    Returns its file, and where it was: `own memory`, `rank <holder>` or `DISK`. `inventories` are
    the windows on each rank's node, by rank. Calls `arrived` with the slots in ascending order,
    from the first again after a failure; and `before_next` after a failure, before passed-on slots
    may be overwritten.

    Raises:
        RefusedWindow: no source has it whole and undamaged; the message has all reasons.
        UnreadableWindow: as RefusedWindow, but a source may return it at the next attempt.
    """
    reasons: list[str] = []
    kind: type[RefusedWindow] = RefusedWindow
    for where, obtain in _sources(memory, candidate, inventories, identity, arrived):
        try:
            return obtain(), where
        except _FAILURES as error:
            logger.warning('refused: window %d from %s: %s', candidate.start, where, error)
            reasons.append(f'{where}: {error}')
            if isinstance(error, _PASSING):
                kind = UnreadableWindow
            before_next()
    raise kind(f'window {candidate.start}: ' + ('; '.join(reasons) or 'no holder'))


def make_room(windows: OwnerWindows, wanted: Window, usable: Sequence[Window]) -> None:
    """Free a file for the window to fetch, if other windows of this rank occupy all files.

    Frees windows that are not in `usable`, the candidates of a recovery, first, then the
    oldest.
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
    arrived: Arrived,
) -> Iterator[tuple[str, Callable[[], WindowFile]]]:
    """Each source, and the call that obtains the window from it."""

    def received(file: WindowFile, header: SlotHeader) -> None:
        """Refuse slots that this rank has not captured."""
        Expected.of(identity).check(header, file.path)
        arrived(file, header)

    if memory.disk_only:
        memory.windows.discard_after(NOWHERE)
    else:
        own = memory.windows.file(candidate.name)
        if own is not None:
            yield 'own memory', partial(_verify_own, own, identity, arrived)
            memory.windows.discard(candidate.name)  # it was refused
        for holder in holders(candidate, memory.rank, inventories):
            yield f'rank {holder}', partial(memory.fetch, candidate, holder, received)
    if memory.disk is not None and memory.disk.has(candidate.name):
        yield DISK, partial(memory.fetch_from_disk, candidate, received)


def _verify_own(file: WindowFile, identity: RankIdentity, arrived: Arrived) -> WindowFile:
    for header in file.verify_identity(Expected.of(identity)):
        file.verify_payloads([header])
        arrived(file, header)
    return file


class ArrivingWindow:
    """Obtains and verifies this rank's part of a window on a separate thread.

    One thread takes slots; any thread may call `close`. `inventories` has the windows on each
    rank's node, by rank.
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
        source = memory, candidate, inventories, identity
        obtain = partial(verified_window, *source, self._arrived, self._before_next)
        self._thread = threading.Thread(
            target=self._run, args=(obtain,), daemon=True, name='sparse-ckpt-window'
        )
        self._thread.start()

    def slot(self, index: int) -> tuple[SlotHeader, Bytes]:
        """Wait for a slot; returns its verified header and payload, valid until the next call.

        Raises:
            RefusedWindow: no source has the window whole and undamaged.
            ReaderClosed: `close` was called.
        """
        self._wait_for(lambda: index in self._slots)
        return self._slots[index]

    def file(self) -> WindowFile:
        """Return the whole window, committed in this rank's memory; errors as in `slot`."""
        self._wait_for(lambda: self._file is not None)
        assert self._file is not None
        return self._file

    def close(self) -> None:
        """End the thread and wake up a waiting reader."""
        with self._changed:
            self._error = self._error or ReaderClosed('the window is not waited for any more')
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

    def _run(self, obtain: Callable[[], tuple[WindowFile, str]]) -> None:
        try:
            file, _ = obtain()
        except Exception as error:  # the waiting reader must raise it
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
        """Wait until the reader no longer uses the slots that it has taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._reader_is_idle() or self._error is not None)
            if self._error is not None:
                raise self._error

    def _reader_is_idle(self) -> bool:
        """True if the reader waits for a missing slot, or has not yet noticed an arrival."""
        return self._awaited is not None and not self._awaited()
