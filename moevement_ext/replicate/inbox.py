# SPDX-License-Identifier: Apache-2.0
"""A holder's replicas of one owner's windows, complete or in transfer (paper sec. 3.3)."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moevement_ext.logger import logger_of
from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.refusal import OtherBytes, RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader, frame_checksum
from moevement_ext.memory.window.twin import TwinWindow
from moevement_ext.rates import CpuCost
from moevement_ext.replicate import protocol
from moevement_ext.replicate.connection import Connection

logger = logger_of(__name__)

# Wait for the base of a stub before the owner must ask again.
_BASE_WAIT_S = 0.5


class Inbox:
    """Replicas of one owner; any thread may answer a request, one at a time.

    Args:
        windows: files of the replicas.
        cost: CPU time of receiving and comparing.
        bases: the holder's own windows, if the replicas are stubs for them (see `window.twin`);
            None: the replicas are whole windows.
    """

    def __init__(
        self, windows: OwnerWindows, cost: CpuCost, bases: OwnerWindows | None = None
    ) -> None:
        self.windows = windows
        self._cost = cost
        self._bases = bases
        self._receiving: WindowFile | None = None
        self._lock = threading.Lock()
        self._current: Connection | None = None

    def answer(
        self,
        connection: Connection,
        request: protocol.PutSlot | protocol.CommitWindow | protocol.DiscardAfter,
        timeout_s: float,
    ) -> protocol.Reply:
        """Carry out a request of the owner; the caller sends the returned answer.

        `connection` has the request's payload; `timeout_s` is for the exchange, plus time to move
        its bytes. After a `RefusedWindow`, `HostMemoryError` or `ValueError`, a refusal, the
        connection stays usable.
        """
        with self._admitted(connection, timeout_s):
            match request:
                case protocol.PutSlot():
                    return self._put(connection, request, timeout_s)
                case protocol.CommitWindow():
                    return self._commit(request.window)
                case protocol.DiscardAfter():
                    self._discard_after(request.start)
                    return protocol.Ack()

    def headers_after(
        self, connection: Connection, start: int, timeout_s: float
    ) -> list[SlotHeader]:
        """Headers of received slots of windows after `start`; errors as in `answer`."""
        with self._admitted(connection, timeout_s):
            return self.windows.headers_after(start)

    @contextmanager
    def _admitted(self, connection: Connection, timeout_s: float) -> Iterator[None]:
        # An older connection of this owner may still receive into the file: cut it off, or bytes
        # in its kernel buffer would overwrite the newer transfer.
        stale = self._current
        if stale is not None and stale is not connection:
            stale.shutdown()
        if not self._lock.acquire(timeout=timeout_s):
            raise ValueError('an earlier transfer of this owner does not end')
        try:
            self._current = connection
            yield
        finally:
            self._current = None
            self._lock.release()

    def _put(
        self, connection: Connection, request: protocol.PutSlot, timeout_s: float
    ) -> protocol.Reply:
        self.windows.agree(request.agreed)
        file = self._file_for(request)
        if request.slot in file.slots():
            if frame_checksum(file.slot_blob(request.slot).frame) == request.frame_checksum:
                return protocol.Ack()
            if file is self._receiving:
                self._abandon()  # from an attempt that the owner has given up
            else:  # captured by a lost process: parts of two captures must not be joined
                logger.warning('%s has other content: it is replaced', file.path)
                self.windows.discard(request.window)
            file = self._file_for(request)
        # Refuse before the transfer.
        payload = file.reserve_slot(request.slot, request.payload_bytes)
        nbytes = request.payload_bytes + request.frame_bytes
        connection.set_deadline(timeout_s, nbytes)
        with self._cost.of(nbytes):
            missing = self._copy_kept(request, payload)
            connection.send(protocol.Proceed(kept=missing is not None))
            frame = connection.receive_bytes(request.frame_bytes)
            file.write_blob(
                request.slot,
                request.payload_bytes,
                frame,
                connection.receive_into if missing is None else _receiver(connection, missing),
            )
        return protocol.Ack()

    def _copy_kept(self, request: protocol.PutSlot, payload: Bytes) -> list[tuple[int, int]] | None:
        """Copy the kept ranges of a payload; returns the gaps, None if all must be sent."""
        kept = request.kept
        base = None if kept is None else self.windows.file(kept.window)
        if kept is None or base is None:
            return None
        earlier = base.payload(0)
        missing = kept.rest(request.payload_bytes, earlier.size)
        kept.copy(earlier, payload)
        return missing

    def _file_for(self, request: protocol.PutSlot) -> WindowFile:
        """The committed or partly received window of this name; begins it if there is none."""
        name = request.window
        committed = self.windows.file(name)
        if committed is not None:
            return committed
        if self._receiving is not None and self._receiving.name != name:
            self._abandon()
        if self._receiving is None and request.window_bytes > self.windows.capacity_bytes:
            self._receiving = self.windows.begin_larger(name, request.window_bytes)
        elif self._receiving is None:
            self._receiving = self.windows.begin(name)
        if self._receiving is None:
            raise ValueError(
                f'no free file for window {name} of rank {self.windows.owner}: '
                f'all hold windows not known to be outdated '
                f'(newest persisted: {self.windows.newest_persisted})'
            )
        return self._receiving

    def _commit(self, name: WindowName) -> protocol.Reply:
        committed = self.windows.file(name)
        if committed is not None:
            return self._confirm(committed, name)
        file = self._receiving
        if file is None or file.name != name:
            raise ValueError(f'window {name} was not received here')
        try:
            file.verify_identity(Expected(owner=self.windows.owner, name=name))
            if not self._has_base(file, name):
                return protocol.NotYet()
            self.windows.commit(file)
        except OtherBytes as difference:
            self._abandon()
            return protocol.Differs(str(difference))
        except RefusedWindow:
            self._abandon()  # the owner sends the window again from the first slot
            raise
        except OSError as error:  # the file was removed
            self._abandon()
            raise RefusedWindow(f'cannot be committed: {error.strerror}', file.path) from error
        self._receiving = None
        return protocol.Ack()

    def _confirm(self, committed: WindowFile, name: WindowName) -> protocol.Reply:
        try:
            return protocol.Ack() if self._has_base(committed, name) else protocol.NotYet()
        except RefusedWindow:
            self.windows.discard(name)  # the base has changed: the owner sends the window again
            raise

    def _has_base(self, stub: WindowFile, name: WindowName) -> bool:
        """True if the base of the stub is here; `OtherBytes` if the base holds another state."""
        if self._bases is None:
            return True
        base = self._bases.file(name, _BASE_WAIT_S)
        if base is None:
            return False
        try:
            TwinWindow(stub, base)
        except RefusedWindow:
            if self._bases.file(name) is base:
                raise
            return False  # its file was reused for another window meanwhile
        return True

    def _abandon(self) -> None:
        if self._receiving is not None:
            self.windows.abandon(self._receiving)
            self._receiving = None

    def _discard_after(self, start: int) -> None:
        self.windows.discard_after(start)
        name = None if self._receiving is None else self._receiving.name
        if name is not None and name.start > start:
            self._receiving = None  # its file is free now


def _receiver(
    connection: Connection, missing: list[tuple[int, int]]
) -> Callable[[memoryview], None]:
    """Receiver of consecutive pieces of a payload of which only some ranges are sent."""
    at, left = 0, deque(missing)

    def receive(piece: memoryview) -> None:
        nonlocal at
        piece_end = at + len(piece)
        while left and left[0][0] < piece_end:
            begin, end = left.popleft()
            if end > piece_end:
                left.appendleft((piece_end, end))
            connection.receive_into(piece[begin - at : min(end, piece_end) - at])
        at = piece_end

    return receive
