# SPDX-License-Identifier: Apache-2.0
"""A rank that sends several requests before it reads a reply."""

import socket
from contextlib import suppress

from moevement_ext.store import wire
from moevement_ext.store.wire import Kind, Request
from tests.unit.store.processes import WAIT_S


class Raw:
    """Connection to a proxy, or to a branch, which is a store to proxies."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(('127.0.0.1', port), WAIT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(Request(Kind.VALIDATE, number=wire.MAGIC))

    def add(self, key: bytes) -> None:
        """Request the next number of a key."""
        self._send(Request(Kind.ADD, (b'/' + key,), number=1))

    def number(self) -> int:
        """Reply to `add`."""
        return int.from_bytes(self._answer(8), 'little', signed=True)

    def pass_by(self) -> None:
        """Return after the peer has read all data that others had sent before."""
        for turn in range(5):
            self._send(Request(Kind.PING, number=turn))
            assert self._answer(4) == turn.to_bytes(4, 'little')

    def is_cut(self) -> bool:
        """True once the peer has closed the connection; False if it replies."""
        with suppress(ConnectionResetError):
            return self._answer(1) == b''
        return True

    def close(self) -> None:
        self._sock.close()

    def _send(self, request: Request) -> None:
        self._sock.sendall(wire.encoded(request))

    def _answer(self, nbytes: int) -> bytes:
        return self._sock.recv(nbytes, socket.MSG_WAITALL)
