# SPDX-License-Identifier: Apache-2.0
"""The connection between the supervisor and an agent, and how the agent finds it."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from moevement_ext.launch.messages import Alive
from moevement_ext.replicate.connection import Connection

ADDRESS_VARIABLE = 'MOEVEMENT_SUPERVISOR'
"""In the environment of an agent, which does not hand it on."""
_HEARTBEAT_S = 1.0
_MESSAGE_S = 10.0
_MOST_BETWEEN_LOOKS_S = 2.0
"""That count as silence: who looks, or all of the allocation, may have stood still (suspended)."""


class Address(NamedTuple):
    """Where the supervisor listens, with the secret of the job: what it hands to its agents."""

    host: str
    port: int
    secret: bytes

    @classmethod
    def parse(cls, text: str) -> 'Address':
        """The address of a string that `str` made."""
        host, port, secret = text.rsplit(' ', 2)
        return cls(host, int(port), bytes.fromhex(secret))

    def __str__(self) -> str:
        return f'{self.host} {self.port} {self.secret.hex()}'


class Link[Received]:
    """One side of it; everything raises `OSError` once it is lost.

    One thread uses it; any may call `heartbeat`.

    Args:
        sock: connected; both sides have recognised each other.
        decoder: of what the other side sends.

    Attributes:
        fd: readable when there is a message.
    """

    def __init__(self, sock: socket.socket, decoder: 'msgspec.msgpack.Decoder[Received]') -> None:
        self.fd = sock.fileno()
        self._connection = Connection(sock)
        self._outgoing = Connection(sock.dup())  # with a deadline of its own
        self._sending = threading.Lock()
        self._closed = False
        self._decoder = decoder
        self._silent_s, self._looked = 0.0, time.monotonic()
        self._sent = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the other side; 0 while one waits to be received.

        So one's own being busy, or stopped, is not taken for the silence of the other.
        """
        now = time.monotonic()
        if _is_ready(self.fd, select.POLLIN):
            self._silent_s = 0.0
        else:
            self._silent_s += min(now - self._looked, _MOST_BETWEEN_LOOKS_S)
        self._looked = now
        return self._silent_s

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; it is small, so that this does not wait."""
        with self._sending:
            self._send(message)

    def receive(self) -> Received:
        """Wait for a message, a few seconds at most."""
        self._connection.set_deadline(_MESSAGE_S)
        message = self._connection.receive(self._decoder)
        self._silent_s, self._looked = 0.0, time.monotonic()
        return message

    def heartbeat(self) -> None:
        """Give a sign of life if it is time for one; never waits. Any thread."""
        if not self._sending.acquire(blocking=False):
            return  # a message is on its way
        try:
            is_time = time.monotonic() - self._sent >= _HEARTBEAT_S
            if is_time and not self._closed and _is_ready(self.fd, select.POLLOUT):
                self._send(Alive())
        finally:
            self._sending.release()

    def close(self) -> None:
        """Close it; the other side notices."""
        self._connection.shutdown()
        with self._sending:
            self._closed = True
            self._outgoing.close()
            self._connection.close()

    def _send(self, message: msgspec.Struct) -> None:
        self._outgoing.set_deadline(_MESSAGE_S)
        self._outgoing.send(message)
        self._sent = time.monotonic()


class Beats:
    """Signs of life to the other side, from a thread of its own: who is busy is not lost.

    Args:
        links: those that there are, asked for each time; on that thread.
    """

    def __init__(self, links: 'Callable[[], Iterable[Link[Any]]]') -> None:
        self._links = links
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name='slurm-beats', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give none any more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_HEARTBEAT_S / 2):
            for link in self._links():
                with suppress(OSError):  # whoever uses the link will notice
                    link.heartbeat()


def _is_ready(fd: int, event: int) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(0))
