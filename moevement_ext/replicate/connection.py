# SPDX-License-Identifier: Apache-2.0
"""A connection to a peer for messages and payloads."""

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from moevement_ext.replicate.protocol import (
    MAX_MESSAGE_BYTES,
    MIN_BYTES_PER_SECOND,
    Reply,
    Request,
)

_LENGTH = struct.Struct('<I')
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_BACKLOG = 16384  # all ranks may connect at the same time


def listen(host: str = '') -> socket.socket:
    """Listen on a free port of one address of this host; empty: of all its addresses.

    Raises `OSError`.
    """
    both = not host and socket.has_dualstack_ipv6()
    host = host or ('::' if both else '0.0.0.0')
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


class Connection:
    """A socket with messages and a deadline. One thread at a time uses it.

    All operations raise `OSError` when the connection is lost, in particular `TimeoutError` past
    the deadline, and `ConnectionError` if the peer violates the protocol.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock
        self._expires: float | None = None

    def set_deadline(self, seconds: float | None, nbytes: int = 0) -> None:
        """Set a deadline of `seconds` plus the time to move `nbytes` for all later operations.

        None: no deadline, as in an idle server; keepalive detects a dead peer.
        """
        self._expires = (
            None if seconds is None else time.monotonic() + seconds + nbytes / MIN_BYTES_PER_SECOND
        )

    def send(self, message: msgspec.Struct) -> None:
        encoded = _ENCODER.encode(message)
        if len(encoded) > MAX_MESSAGE_BYTES:
            raise ConnectionError(f'{type(message).__name__} of {len(encoded)} bytes is too large')
        self.send_bytes(_LENGTH.pack(len(encoded)) + encoded)

    def send_bytes(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            self._await_turn()
            view = view[self._socket.send(view) :]

    def receive[Message](
        self, decoder: 'msgspec.msgpack.Decoder[Message]', limit: int = MAX_MESSAGE_BYTES
    ) -> Message:
        """Receive one message of at most `limit` bytes; never allocates more."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if length > limit:
            raise ConnectionError(f'message of {length} bytes exceeds {limit}')
        encoded = self.receive_bytes(length)
        try:
            return decoder.decode(encoded)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConnectionError(f'message cannot be understood: {error}') from error

    def receive_request(self) -> Request:
        return self.receive(_REQUESTS)

    def receive_reply(self) -> Reply:
        return self.receive(_REPLIES)

    def receive_bytes(self, count: int) -> memoryview:
        data = memoryview(bytearray(count))
        self.receive_into(data)
        return data

    def receive_into(self, view: memoryview) -> None:
        while view:
            self._await_turn()
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionError('connection closed by the peer')
            view = view[received:]

    def shutdown(self) -> None:
        """Wake up the thread that waits on this connection. Any thread."""
        with suppress(OSError):  # already gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _await_turn(self) -> None:
        if self._expires is None:
            self._socket.settimeout(None)
            return
        remaining = self._expires - time.monotonic()
        if remaining <= 0:
            raise TimeoutError('deadline passed')
        self._socket.settimeout(remaining)


# Limit for the end of an interrupted thread; longer only while it opens a connection.
_TO_END_S = 5.0
_AGAIN_S = 0.1


def join_interrupted(thread: threading.Thread, interrupt: Callable[[], None]) -> None:
    """Wait a limited time for the end of a stopped thread.

    `interrupt` is called repeatedly, as the thread may just have opened a connection.
    """
    expires = time.monotonic() + _TO_END_S
    while thread.is_alive() and time.monotonic() < expires:
        interrupt()
        thread.join(_AGAIN_S)


MOST_STRANGERS = 32
"""Beyond this number the oldest is closed, so that peers of the job can always connect."""
# Wait for the oldest to close, on a busy machine; a refusal might hit a peer of the job.
_TO_GIVE_WAY_S = 5.0


class Strangers:
    """A bounded number of connections whose peer has not yet proved its membership. Any thread."""

    def __init__(self) -> None:
        self._threads: dict[Connection, threading.Thread] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, connection: Connection, thread: threading.Thread) -> None:
        with self._lock:
            self._threads[connection] = thread

    def forget(self, connection: Connection) -> None:
        """Remove a connection that ended or is authenticated."""
        with self._lock:
            self._threads.pop(connection, None)

    def make_room(self) -> bool:
        """Close the oldest connection if necessary; False without room. Accepting thread."""
        with self._lock:
            if len(self._threads) < MOST_STRANGERS:
                return True
            oldest, thread = next(iter(self._threads.items()))
        oldest.shutdown()
        thread.join(_TO_GIVE_WAY_S)
        return not thread.is_alive()
