# SPDX-License-Identifier: Apache-2.0
"""The connection between the supervisor and an agent."""

import socket
import time

import msgspec

from moevement_ext.replicate.connection import Connection
from moevement_ext.slurm.messages import Alive

_HEARTBEAT_S = 1.0
_MESSAGE_S = 10.0


class Link[Received]:
    """One side of it; everything raises `OSError` once it is lost. One thread uses it.

    Args:
        sock: connected; both sides have recognised each other.
        decoder: of what the other side sends.

    Attributes:
        fd: readable when there is a message.
    """

    def __init__(self, sock: socket.socket, decoder: 'msgspec.msgpack.Decoder[Received]') -> None:
        self.fd = sock.fileno()
        self._connection = Connection(sock)
        self._decoder = decoder
        self._heard = time.monotonic()
        self._sent = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the other side."""
        return time.monotonic() - self._heard

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; it is small, so that this does not wait."""
        self._connection.set_deadline(_MESSAGE_S)
        self._connection.send(message)
        self._sent = time.monotonic()

    def receive(self) -> Received:
        """Wait for a message, a few seconds at most."""
        self._connection.set_deadline(_MESSAGE_S)
        message = self._connection.receive(self._decoder)
        self._heard = time.monotonic()
        return message

    def heartbeat(self) -> None:
        """Give a sign of life if it is time for one."""
        if time.monotonic() - self._sent >= _HEARTBEAT_S:
            self.send(Alive())

    def close(self) -> None:
        """Close it; the other side notices."""
        self._connection.close()
