# SPDX-License-Identifier: Apache-2.0
"""The connection between supervisor and agent; the supervisor accepts agents on separate threads.

So an unauthenticated peer blocks neither the supervisor nor other agents.
"""

import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from moevement_ext.launch.child import is_ready
from moevement_ext.launch.messages import FROM_AGENT, Alive, FromAgent, Here
from moevement_ext.logger import logger_of
from moevement_ext.replicate.connection import Connection, Strangers, listen
from moevement_ext.replicate.secret import admit

ADDRESS_VARIABLE = 'MOEVEMENT_SUPERVISOR'
"""Environment variable of an agent; the agent removes it before it starts workers."""
_HEARTBEAT_S = 1.0
_MESSAGE_S = 10.0
# Limit of the silence counted between two checks: this process, or the whole allocation, may have
# been suspended in between.
_MOST_BETWEEN_CHECKS_S = 2.0


class Address(NamedTuple):
    """Host and port of the supervisor, with the secret of the job, for its agents."""

    host: str
    port: int
    secret: bytes

    @classmethod
    def parse(cls, text: str) -> 'Address':
        host, port, secret = text.rsplit(' ', 2)
        return cls(host, int(port), bytes.fromhex(secret))

    def __str__(self) -> str:
        return f'{self.host} {self.port} {self.secret.hex()}'


class Link[Received]:
    """One end of an authenticated connection; methods raise `OSError` once it is lost.

    One thread uses the link; any thread may call `heartbeat`. `fd` is readable when there is a
    message; `decoder` decodes the peer's messages.
    """

    def __init__(self, sock: socket.socket, decoder: 'msgspec.msgpack.Decoder[Received]') -> None:
        self.fd = sock.fileno()
        self._connection = Connection(sock)
        self._outgoing = Connection(sock.dup())  # for a separate deadline
        self._sending = threading.Lock()
        self._closed = False
        self._decoder = decoder
        self._silent_s, self._checked_at = 0.0, time.monotonic()
        self._sent = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the peer's last message; 0 while a received message is unread.

        A peer therefore does not count as silent while this process is busy or stopped.
        """
        now = time.monotonic()
        if is_ready(self.fd):
            self._silent_s = 0.0
        else:
            self._silent_s += min(now - self._checked_at, _MOST_BETWEEN_CHECKS_S)
        self._checked_at = now
        return self._silent_s

    def send(self, message: msgspec.Struct) -> None:
        with self._sending:
            self._send(message)

    def receive(self) -> Received:
        """Wait for a message, at most a few seconds."""
        self._connection.set_deadline(_MESSAGE_S)
        message = self._connection.receive(self._decoder)
        self._silent_s, self._checked_at = 0.0, time.monotonic()
        return message

    def heartbeat(self) -> None:
        """Send a heartbeat if one is due; never blocks. Any thread."""
        if not self._sending.acquire(blocking=False):
            return  # another thread is sending a message
        try:
            is_time = time.monotonic() - self._sent >= _HEARTBEAT_S
            if is_time and not self._closed and is_ready(self.fd, event=select.POLLOUT):
                self._send(Alive())
        finally:
            self._sending.release()

    def close(self) -> None:
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
    """Background thread that sends heartbeats, so that a busy process does not count as lost.

    `links` returns the open links; called on that thread before each round.
    """

    def __init__(self, links: 'Callable[[], Iterable[Link[Any]]]') -> None:
        self._links = links
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name='slurm-beats', daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_HEARTBEAT_S / 2):
            for link in self._links():
                with suppress(OSError):  # the thread that uses the link will notice
                    link.heartbeat()


logger = logger_of(__name__)

_GREETING_S = 5.0
# Pause after an error that may be temporary, such as too many open files.
_PAUSE_S = 1.0


class Listener:
    """Authenticates agents and queues them for the supervisor.

    `port` is that of the listening socket; `fd` is readable when an agent has arrived.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._server = listen()
        self.port: int = self._server.getsockname()[1]
        self.fd = os.eventfd(0)
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._strangers = Strangers()
        self._arrived: queue.SimpleQueue[tuple[Here, Link[FromAgent]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name='slurm-listener', daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[Here, Link[FromAgent]]]:
        """Take the authenticated agents that have arrived; `fd` is not readable afterwards."""
        os.eventfd_read(self.fd)
        return [self._arrived.get() for _ in range(self._arrived.qsize())]

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown(socket.SHUT_RDWR)  # wakes the listening thread
        self._thread.join()
        self._server.close()
        with self._closing:
            os.close(self.fd)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._server.accept()
                self._receive(sock)
            except (OSError, RuntimeError) as error:  # of that connection, or of this process
                if not self._closed.wait(_PAUSE_S):
                    logger.warning('an agent could not connect: %s', error)

    def _receive(self, sock: socket.socket) -> None:
        if not self._strangers.make_room():
            sock.close()
            return
        connection = Connection(sock)
        thread = threading.Thread(
            target=self._greet, args=(sock, connection), name='slurm-greeting', daemon=True
        )
        self._strangers.add(connection, thread)
        try:
            thread.start()
        except BaseException:  # no thread could be started
            self._strangers.forget(connection)
            sock.close()
            raise

    def _greet(self, sock: socket.socket, connection: Connection) -> None:
        try:
            self._admit(sock, connection)
        except OSError:
            sock.close()
        finally:
            self._strangers.forget(connection)

    def _admit(self, sock: socket.socket, connection: Connection) -> None:
        connection.set_deadline(_GREETING_S)
        admit(connection, self._secret)
        self._strangers.forget(connection)
        link = Link(sock, FROM_AGENT)
        here = link.receive()
        if not isinstance(here, Here):
            link.close()
            raise ConnectionError('the first message of an agent was not Here')
        with self._closing:
            if self._closed.is_set():
                link.close()
                return
            self._arrived.put((here, link))
            os.eventfd_write(self.fd, 1)
