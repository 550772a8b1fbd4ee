# SPDX-License-Identifier: Apache-2.0
"""A connection to a store that a test can cut."""

import socket
import threading
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore


class Way:
    """Relay from another port of this machine to `port` of the store."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(('127.0.0.1', 0), backlog=64)
        self.port: int = self._listening.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.is_open = True
        """False: new connections are dropped, too."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Drop all connections; new ones can be made."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if not self.is_open:
                    near.close()
                    continue
                far = socket.create_connection(('127.0.0.1', self._to))
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while found := source.recv(1 << 16):
                sink.sendall(found)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class DistantStore(Way):
    """A real store, and a way to it that stays cut until it is repaired."""

    def __init__(self) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        super().__init__(self.store.port)

    def connect(self, timeout: timedelta) -> TCPStore:
        return TCPStore('127.0.0.1', self.port, is_master=False, timeout=timeout)

    def cut(self) -> None:
        """Drop all connections, and all new ones."""
        self.is_open = False
        super().cut()

    def repair(self) -> None:
        self.is_open = True
