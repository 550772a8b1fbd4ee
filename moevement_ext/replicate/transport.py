# SPDX-License-Identifier: Apache-2.0
"""Messages between the holders of replicas, and a socket connection that carries them.

Every exchange is a request and its reply, both a 4-byte length and a tagged msgpack struct. Bulk
bytes follow a message raw and are received straight into the mapped file. Plain TCP, because it
must outlive the torch process groups that are torn down and rebuilt in a recovery.

A connection begins with a greeting (``greeting``); then, from the client's side:

    PutSlot -> Ack (already there) | Refused | Proceed, then payload and frame -> Ack | Refused
    CommitWindow | Persisted | DiscardAfter -> Ack | Refused
    ListWindows -> WindowList
    FetchWindow -> Refused | WindowHead, then per slot SlotHead, payload, frame -> Ack | Refused
    FetchHeaders -> Refused | WindowHead, then per slot SlotHead and frame -> Ack
    FetchLog -> Refused | NotYet | LogHead, then the bytes
"""

import socket
import struct
import time
from typing import Annotated

import msgspec

from moevement_ext.memory.log_record import LoggedTensor, LogKey
from moevement_ext.memory.slot import Count, WindowName

PROTOCOL_VERSION = 4
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_FRAME_BYTES = 64 * 2**20
MIN_BYTES_PER_SECOND = 10 * 2**20
"""Slowest transfer that is waited for: deadlines grow with the bytes to move at this rate."""

_LENGTH = struct.Struct('<I')

FrameBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME_BYTES)]


class PutSlot(msgspec.Struct, frozen=True, tag=True):
    """Announces one sealed slot of the sender's window."""

    owner: Count
    start: Count
    plan: str
    slot: Count
    payload_bytes: Count
    frame_bytes: FrameBytes
    frame_checksum: Count
    """Identifies the content of the slot (``slot.frame_checksum``)."""
    persisted: WindowName | None
    """The newest window the owner knows to be persisted everywhere: older replicas may go."""


class CommitWindow(msgspec.Struct, frozen=True, tag=True):
    """All slots were sent: verify the whole window and make it permanent."""

    owner: Count
    start: Count
    plan: str


class Persisted(msgspec.Struct, frozen=True, tag=True):
    """The window is persisted on every rank."""

    owner: Count
    start: Count
    plan: str


class DiscardAfter(msgspec.Struct, frozen=True, tag=True):
    """Windows after ``start`` (-1: all) belong to an abandoned past."""

    owner: Count
    start: int


class ListWindows(msgspec.Struct, frozen=True, tag=True):
    """Which committed windows are on this node?"""


class FetchWindow(msgspec.Struct, frozen=True, tag=True):
    """Send a whole committed window."""

    owner: Count
    start: Count
    plan: str


class FetchHeaders(msgspec.Struct, frozen=True, tag=True):
    """Send the headers of all sealed slots of windows after ``start``, complete or not."""

    owner: Count
    start: int


class FetchLog(msgspec.Struct, frozen=True, tag=True):
    """Send one record of the upstream log of the peer."""

    key: LogKey


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Done."""


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """The place is reserved: send payload and frame now."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Not done, and why."""

    reason: str


class RemoteWindow(msgspec.Struct, frozen=True, array_like=True):
    """One committed window on the node of the peer."""

    owner: int
    start: int
    plan: str


class WindowList(msgspec.Struct, frozen=True, tag=True):
    """Answer to ``ListWindows``."""

    windows: list[RemoteWindow]


class WindowHead(msgspec.Struct, frozen=True, tag=True):
    """The window that follows: number of slots and of bytes."""

    slots: Count
    nbytes: Count


class SlotHead(msgspec.Struct, frozen=True, tag=True):
    """The slot that follows."""

    slot: Count
    payload_bytes: Count
    frame_bytes: FrameBytes


class LogHead(msgspec.Struct, frozen=True, tag=True):
    """The record that follows."""

    tensor: LoggedTensor


class NotYet(msgspec.Struct, frozen=True, tag=True):
    """The record is not there but may still come: ask again."""


Request = (
    PutSlot
    | CommitWindow
    | Persisted
    | DiscardAfter
    | ListWindows
    | FetchWindow
    | FetchHeaders
    | FetchLog
)
Reply = Ack | Proceed | Refused | WindowList | WindowHead | SlotHead | LogHead | NotYet

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class ProtocolError(ConnectionError):
    """The other side does not speak this protocol; the connection is of no more use."""


class Connection:
    """A socket with messages and a deadline. One thread at a time uses it.

    All operations raise ``OSError`` when the connection is lost, ``TimeoutError`` (an ``OSError``)
    past the deadline, and ``ProtocolError`` (also one) for what cannot be understood.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock
        self._expires: float | None = None

    def set_deadline(self, seconds: float | None, nbytes: int = 0) -> None:
        """Let everything from now on be done within ``seconds`` plus time to move ``nbytes``.

        None: wait without end, which only an idle server does; keepalive ends a dead peer.
        """
        self._expires = (
            None if seconds is None else time.monotonic() + seconds + nbytes / MIN_BYTES_PER_SECOND
        )

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        encoded = _ENCODER.encode(message)
        if len(encoded) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f'{type(message).__name__} of {len(encoded)} bytes is too large')
        self.send_bytes(_LENGTH.pack(len(encoded)) + encoded)

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send raw bytes as they lie in memory."""
        view = memoryview(data)
        while view:
            self._await_turn()
            view = view[self._socket.send(view) :]

    def receive[Message](
        self, decoder: 'msgspec.msgpack.Decoder[Message]', limit: int = MAX_MESSAGE_BYTES
    ) -> Message:
        """Receive one message of at most ``limit`` bytes; nothing longer is even allocated."""
        prefix = bytearray(_LENGTH.size)
        self.receive_into(memoryview(prefix))
        (length,) = _LENGTH.unpack(prefix)
        if length > limit:
            raise ProtocolError(f'message of {length} bytes exceeds {limit}')
        encoded = bytearray(length)
        self.receive_into(memoryview(encoded))
        try:
            return decoder.decode(encoded)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f'message cannot be understood: {error}') from error

    def receive_request(self) -> Request:
        """Receive one message as the server."""
        return self.receive(_REQUESTS)

    def receive_reply(self) -> Reply:
        """Receive one message as the client."""
        return self.receive(_REPLIES)

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with raw bytes."""
        while view:
            self._await_turn()
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionError('connection closed by the peer')
            view = view[received:]

    def shutdown(self) -> None:
        """Wake up whichever thread waits on this connection, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # already gone
            pass

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _await_turn(self) -> None:
        if self._expires is None:
            self._socket.settimeout(None)
            return
        remaining = self._expires - time.monotonic()
        if remaining <= 0:
            raise TimeoutError('deadline passed')
        self._socket.settimeout(remaining)
