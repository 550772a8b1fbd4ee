# SPDX-License-Identifier: Apache-2.0
"""Accepts agents on separate threads.

So an unauthenticated peer blocks neither the supervisor nor other agents.
"""

import os
import queue
import socket
import threading

from moevement_ext.launch.link import Link
from moevement_ext.launch.messages import FROM_AGENT, FromAgent, Here
from moevement_ext.logger import logger_of
from moevement_ext.replicate.connection import Connection, Strangers
from moevement_ext.replicate.greeting import admit

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
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(('', 0), family=family, dualstack_ipv6=both)
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
                self._hear(sock)
            except (OSError, RuntimeError) as error:  # of that connection, or of this process
                if not self._closed.wait(_PAUSE_S):
                    logger.warning('an agent could not connect: %s', error)

    def _hear(self, sock: socket.socket) -> None:
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
