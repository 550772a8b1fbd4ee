# SPDX-License-Identifier: Apache-2.0
"""Clients of a peer: send replicas; fetch windows, logs, ledgers and parts of other layouts.

A replay prefetches a neighbour's log records (paper sec. 3.4).
"""

import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass

import torch
import xxhash

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.shelf import Part
from moevement_ext.memory.tensors import dtype_of
from moevement_ext.memory.upstream_log.record import CorruptLog, Direction, LoggedTensor, LogKey
from moevement_ext.memory.window.file import SlotBlob, WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.name import NOTHING_AGREED, Agreed, WindowName
from moevement_ext.memory.window.refusal import OtherBytes, RefusedWindow, UnreadableWindow
from moevement_ext.memory.window.slot import SlotHeader, decode_frame, frame_checksum
from moevement_ext.memory.window.twin import OwnParts, owner_header, stub_of, stub_window_bytes
from moevement_ext.replicate import protocol
from moevement_ext.replicate.connection import Connection, join_interrupted
from moevement_ext.replicate.secret import introduce

CHUNK_BYTES = 2**20
"""Size of one send under a rate limit."""
_MAX_HEADERS = 4096
_MAX_HEADERS_BYTES = 256 * 2**20


Range = tuple[int, int, int]
"""Index of a record in the header of its slot, first byte within it, and one past the last."""


class PeerLost(ConnectionError):
    """A peer does not answer: dead, unreachable, or slower than the deadline."""


class PeerRefused(SparseCheckpointError):
    """A living peer refused a request; the message is its reason."""


class ReplicaClient:
    """Connection to one peer, opened on first use and after a loss. One thread at a time uses it.

    The client trusts no message before the peer has proved that it belongs to the job, and a
    peer's message alone never decides the size of an allocation. Every method raises `PeerLost`
    if the peer does not answer in time, `PeerRefused` with its reason, or `UnreadableWindow` if it
    cannot read its files now. All requests are safe to repeat.

    Args:
        address: host and port of the peer's `ReplicaServer`.
        secret: secret of this start of the job.
        timeout_s: time for one exchange, plus time to move its bytes.
        max_record_bytes: upper bound of a log record, such as the size of the peer's log.
    """

    takes_all = True
    """The peer receives whole windows."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        timeout_s: float = 30.0,
        max_record_bytes: int = 2**30,
    ) -> None:
        self.address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._max_record_bytes = max_record_bytes
        self._connection: Connection | None = None
        self._interrupted = False
        self._refused: WindowName | None = None

    def open(self) -> None:
        """Connect before the caller takes resources that a silent peer would block."""
        with self._exchange():
            pass

    def put_slot(
        self,
        owner: int,
        file: WindowFile,
        slot: int,
        agreed: Agreed = NOTHING_AGREED,
        before: Callable[[int], object] = lambda nbytes: None,
    ) -> int:
        """Send a sealed slot of the window in `file`, unless the peer has it; returns sent bytes.

        0 for a stub: its few bytes do not measure the link. The window may be incomplete.
        `agreed` lets the peer recycle files. `before` is called with the size of each chunk; it may
        wait up to the time of the chunk at `MIN_BYTES_PER_SECOND`.
        """
        blob = self._blob(file, slot)
        # Ranges that the peer can copy from an earlier window.
        kept = file.kept if self.takes_all and file.name != self._refused else None
        request = protocol.PutSlot(
            owner=owner,
            window=file.required_name(),
            slot=slot,
            payload_bytes=len(blob.payload),
            frame_bytes=len(blob.frame),
            frame_checksum=frame_checksum(blob.frame),
            agreed=agreed,
            window_bytes=self._window_bytes(file),
            kept=kept,
        )
        nbytes = len(blob.payload) + len(blob.frame)
        with self._exchange(nbytes) as connection:
            connection.send(request)
            reply = _reply(connection)
            if isinstance(reply, protocol.Ack):
                return 0
            parts, payload = [memoryview(blob.frame)], memoryview(blob.payload)
            if _require(reply, protocol.Proceed).kept and kept is not None:
                parts += [payload[begin:end] for begin, end in kept.rest(len(payload))]
                # Reset once the slot is accepted: kept bytes may be damaged.
                self._refused = request.window
            else:
                parts.append(payload)
            for part in parts:
                for at in range(0, len(part), CHUNK_BYTES):
                    chunk = part[at : at + CHUNK_BYTES]
                    before(len(chunk))
                    connection.send_bytes(chunk)
            _expect(connection, protocol.Ack)
            if kept is not None:
                self._refused = None
            return sum(map(len, parts)) if self.takes_all else 0

    def commit(self, owner: int, window: WindowName) -> bool:
        """Ask the peer to commit a fully sent window.

        False if a twin has not captured it yet; `OtherBytes` if it has captured different bytes.
        """
        with self._exchange() as connection:
            connection.send(protocol.CommitWindow(owner, window))
            self._refused = window  # reset after the reply: kept bytes may be damaged
            reply = _reply(connection)
            self._refused = None
        if isinstance(reply, protocol.NotYet):
            return False
        if isinstance(reply, protocol.Differs):
            raise OtherBytes(reply.reason)
        _require(reply, protocol.Ack)
        return True

    def discard_after(self, owner: int, start: int) -> None:
        """Ask the peer to drop the owner's replicas that begin after `start` (-1: all)."""
        with self._exchange() as connection:
            connection.send(protocol.DiscardAfter(owner, start))
            _expect(connection, protocol.Ack)

    def fetch_window(
        self,
        owner: int,
        window: WindowName,
        into: WindowFile,
        received: Callable[[WindowFile, SlotHeader], None] = lambda file, header: None,
    ) -> list[SlotHeader]:
        """Receive a whole window into `into`, verify it, and return its headers, slot 0 first.

        Calls `received` with every received and undamaged slot, slot 0 first. Raises
        `RefusedWindow` if the window is damaged or not the requested one, or `FileTooSmall` before
        a slot is received.
        """
        into.begin(window)  # drops the remains of an interrupted fetch
        with self._exchange() as connection:
            connection.send(protocol.FetchWindow(owner, window))
            # The peer reads the whole window before it answers; its size is not known yet.
            connection.set_deadline(self._timeout_s, into.capacity)
            head = _expect(connection, protocol.WindowHead)
            into.require(head.nbytes, head.slots)
            connection.set_deadline(self._timeout_s, min(head.nbytes, into.capacity))
            for _ in range(head.slots):
                slot = _expect(connection, protocol.SlotHead)
                frame = connection.receive_bytes(slot.frame_bytes)
                fill = connection.receive_into
                try:
                    header = into.write_blob(slot.slot, slot.payload_bytes, frame, fill)
                except ValueError as error:  # a repeated slot, or an impossible slot number
                    raise RefusedWindow(f'{self._peer} sends no window: {error}') from error
                received(into, header)
            _expect(connection, protocol.Ack)
        return into.verify_identity(Expected(owner=owner, name=window))

    def fetch_headers(self, owner: int, start: int) -> list[SlotHeader]:
        """Receive the headers of the peer's windows after `start`, complete or not."""
        return self._headers(protocol.FetchHeaders(owner, start))

    def _headers(self, request: protocol.Request) -> list[SlotHeader]:
        """Raises `RefusedWindow` for a damaged answer, or more headers than windows can have."""
        headers = []
        with self._exchange() as connection:
            connection.send(request)
            head = _expect(connection, protocol.WindowHead)
            if max(head.slots / _MAX_HEADERS, head.nbytes / _MAX_HEADERS_BYTES) > 1:
                raise RefusedWindow(f'{head.slots} headers of {head.nbytes} bytes are too many')
            connection.set_deadline(self._timeout_s, head.nbytes)
            for _ in range(head.slots):
                frame = connection.receive_bytes(_expect(connection, protocol.SlotHead).frame_bytes)
                try:
                    headers.append(decode_frame(frame))
                except ValueError as error:
                    raise RefusedWindow(f'a header is damaged: {error}') from error
            _expect(connection, protocol.Ack)
        return headers

    def fetch_log(self, key: LogKey) -> tuple[LoggedTensor, bytearray] | None:
        """Receive and verify one record of the peer's upstream log; `CorruptLog` if it differs.

        None if the record is not there after a short wait of the peer; try again.
        """
        with self._exchange() as connection:
            connection.send(protocol.FetchLog(key))
            reply = _reply(connection)
            if isinstance(reply, protocol.NotYet):
                return None
            tensor = _require(reply, protocol.LogHead).tensor
            if tensor.nbytes > self._max_record_bytes:
                raise CorruptLog(
                    f'{key}: the peer announces {tensor.nbytes} bytes, but no record of its log '
                    f'has more than {self._max_record_bytes}'
                )
            connection.set_deadline(self._timeout_s, tensor.nbytes)
            data = bytearray(tensor.nbytes)
            connection.receive_into(memoryview(data))
        if xxhash.xxh3_64_intdigest(data) != tensor.checksum:
            raise CorruptLog(f'{key}, from {self._peer}, is damaged: checksum mismatch')
        return tensor, data

    def fetch_ledger(self, after: int, to: int) -> list[LedgerEntry]:
        """Those ledger entries of iterations after `after` up to `to` that the peer has."""
        with self._exchange() as connection:
            connection.send(protocol.FetchLedger(after, to))
            entries = _expect(connection, protocol.LedgerEntries).entries
            if not all(after < entry.iteration <= to for entry in entries):
                raise ConnectionError('it sends ledger entries of other iterations')
        return entries

    def fetch_part(self, part: Part) -> list[SlotHeader]:
        """Headers of a part of a window in another layout; `RefusedWindow` unless it is whole."""
        headers = self._headers(protocol.FetchPart(part))
        if [header.slot for header in headers] != list(range(part.window.length)):
            raise RefusedWindow(f'window {part.window.start} of rank {part.owner} is not whole')
        return headers

    def fetch_ranges(
        self, part: Part, slot: int, ranges: Sequence[Range], into: Sequence[memoryview]
    ) -> None:
        """Receive ranges of records into places of their sizes; `RefusedWindow` if damaged."""
        nbytes = sum(map(len, into))
        with self._exchange(nbytes) as connection:
            connection.send(protocol.FetchRanges(part, slot, list(ranges)))
            head = _expect(connection, protocol.RangesHead)
            if head.nbytes != nbytes:
                raise RefusedWindow(
                    f'the peer announces {head.nbytes} bytes, {nbytes} were requested'
                )
            digest = xxhash.xxh3_64()
            for view in into:
                connection.receive_into(view)
                digest.update(view)
        if digest.intdigest() != head.checksum:
            raise RefusedWindow(f'ranges from {self._peer} are damaged: checksum mismatch')

    @property
    def _peer(self) -> str:
        return 'peer {}:{}'.format(*self.address)

    def _blob(self, file: WindowFile, slot: int) -> SlotBlob:
        return file.slot_blob(slot)

    def _window_bytes(self, file: WindowFile) -> int:
        """File size at the peer for the sent part of a window."""
        return file.capacity

    def interrupt(self) -> None:
        """Make the current and all later exchanges raise `PeerLost`. Any thread."""
        self._interrupted = True
        connection = self._connection
        if connection is not None:
            connection.shutdown()

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _exchange(self, nbytes: int = 0) -> Iterator[Connection]:
        """Yield the connection, with a deadline; leave it usable or closed."""
        try:
            connection = self._connection or self._connect()
            connection.set_deadline(self._timeout_s, nbytes)
            yield connection
        except OSError as error:
            self.close()
            raise PeerLost(f'{self._peer} is lost: {error}') from error
        except PeerRefused:
            raise  # a refusal is a regular end of an exchange
        except BaseException:
            self.close()  # bytes of this exchange may still arrive
            raise

    def _connect(self) -> Connection:
        sock = socket.create_connection(self.address, timeout=self._timeout_s)
        connection = self._connection = Connection(sock)
        if self._interrupted:  # during the connect
            raise ConnectionError('interrupted')
        connection.set_deadline(self._timeout_s)
        reason = introduce(connection, self._secret)
        if reason is not None:
            self.close()
            raise PeerRefused(reason)
        return connection


def _expect[Expected: protocol.Reply](connection: Connection, expected: type[Expected]) -> Expected:
    return _require(_reply(connection), expected)


def _reply(connection: Connection) -> protocol.Reply:
    reply = connection.receive_reply()
    if isinstance(reply, protocol.Refused):
        raise (UnreadableWindow if reply.unread else PeerRefused)(reply.reason)
    return reply


def _require[Expected: protocol.Reply](reply: protocol.Reply, expected: type[Expected]) -> Expected:
    if not isinstance(reply, expected):
        raise ConnectionError(f'unexpected answer {type(reply).__name__}')
    return reply


class TwinClient(ReplicaClient):
    """Client of a twin, with the same captures except `own_parts`, which receives only stubs."""

    takes_all = False

    def __init__(self, address: tuple[str, int], secret: bytes, own_parts: OwnParts) -> None:
        super().__init__(address, secret)
        self._own_parts = own_parts

    def fetch_headers(self, owner: int, start: int) -> list[SlotHeader]:
        """Fetch the headers as sealed by the owner."""
        stubs = super().fetch_headers(owner, start)
        return [owner_header(stub, f'peer {self.address[0]}') for stub in stubs]

    def _blob(self, file: WindowFile, slot: int) -> SlotBlob:
        return stub_of(file, slot, self._own_parts)

    def _window_bytes(self, file: WindowFile) -> int:
        """0 for the usual size; of a resent window, perhaps from other flags, its size."""
        whole = len(file.slots()) == file.length()
        return stub_window_bytes(file, self._own_parts) if whole else 0


MAX_BYTES_AHEAD = 256 * 2**20


class ReaderClosed(SparseCheckpointError):
    """A reader of a log or window was closed while, or before, something was taken from it."""


@dataclass(eq=False)
class LogReader:
    """All records of one direction from one neighbour, fetched in order on a background thread.

    The replaying thread calls `take`; any thread may call `close`.

    Args:
        client: client of the neighbour; the reader owns and closes it.
        direction: direction in which the neighbour sent the tensors.
        counts: iterations in ascending order, each with its number of tensors.
        max_bytes: limit of prefetched bytes; host memory holds at most one record more.
    """

    _client: ReplicaClient
    _direction: Direction
    counts: InitVar[Sequence[tuple[int, int]]]
    max_bytes: int = MAX_BYTES_AHEAD

    def __post_init__(self, counts: Sequence[tuple[int, int]]) -> None:
        keys = [LogKey(t, self._direction, sequence) for t, n in counts for sequence in range(n)]
        self._to_take = deque(keys)
        self._fetched: deque[tuple[torch.Tensor, int]] = deque()
        self._bytes_ahead = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, args=(keys,), name=f'log-reader-{self._direction}', daemon=True
        )
        self._thread.start()

    def take(self, iteration: int, sequence: int, timeout_s: float | None = None) -> torch.Tensor:
        """Wait for the next tensor, on the CPU; the caller owns its memory.

        `sequence` is the index among the tensors sent in that iteration, from 0. Raises
        `ReaderClosed`, also while waiting; `PeerLost`, `PeerRefused` or `CorruptLog`, now and in
        all later calls, if the neighbour cannot deliver the tensor; `TimeoutError` after
        `timeout_s`, when the call may be repeated; `ValueError` if it is not the next in order.
        """
        key = LogKey(iteration, self._direction, sequence)
        with self._changed:
            if not self._to_take or self._to_take[0] != key:
                expected = self._to_take[0] if self._to_take else 'nothing more'
                raise ValueError(f'{key} is taken out of order, expected was {expected}')
            self._changed.wait_for(lambda: self._fetched or self._error, timeout_s)
            if not self._fetched:
                raise self._error or TimeoutError(
                    f'{key} has not come from {self._neighbour} within {timeout_s:g} s'
                )
            tensor, nbytes = self._fetched.popleft()
            self._to_take.popleft()
            self._bytes_ahead -= nbytes
            self._changed.notify_all()
        return tensor

    def close(self) -> None:
        """End the thread and wake up a waiting `take`."""
        with self._changed:
            self._fetched.clear()
            self._error = ReaderClosed(f'the reader of {self._neighbour} was closed')
            self._changed.notify_all()
        join_interrupted(self._thread, self._client.interrupt)

    @property
    def _neighbour(self) -> str:
        host, port = self._client.address
        return f'the log sent {self._direction} by {host}:{port}'

    def _run(self, keys: Sequence[LogKey]) -> None:
        try:
            for key in keys:
                if not self._fetch(key):
                    break
        except (PeerLost, PeerRefused, CorruptLog) as error:
            self._fail(type(error)(f'{self._neighbour} cannot deliver {key}: {error}'))
        except Exception as error:  # e.g. no memory: `take` must raise it
            self._fail(error)
        finally:
            self._client.close()

    def _fetch(self, key: LogKey) -> bool:
        """Fetch one record, without a timeout; False if the reader was closed."""
        while self._may_go_on():
            reply = self._client.fetch_log(key)  # the neighbour waits a moment for the record
            if reply is None:
                continue
            tensor, nbytes = _as_tensor(*reply), len(reply[1])
            with self._changed:
                if self._error is None:
                    self._fetched.append((tensor, nbytes))
                    self._bytes_ahead += nbytes
                    self._changed.notify_all()
            return True
        return False

    def _may_go_on(self) -> bool:
        """Wait until there is room for another record; False if the reader was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes_ahead < self.max_bytes or self._error)
            return self._error is None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error  # an interrupted exchange only repeats the first
            self._changed.notify_all()


def _as_tensor(logged: LoggedTensor, data: bytearray) -> torch.Tensor:
    """Tensor over the memory of `data`, without a copy."""
    dtype = dtype_of(logged.dtype)
    if dtype is None:
        raise CorruptLog(f'unknown dtype {logged.dtype!r}')
    if math.prod(logged.shape) * dtype.itemsize != len(data):
        raise CorruptLog(f'{len(data)} bytes do not make {dtype} of shape {logged.shape}')
    try:
        if not data:
            return torch.empty(logged.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(logged.shape)
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes beyond torch's integers
        raise CorruptLog(f'no tensor has the shape {logged.shape}') from error
