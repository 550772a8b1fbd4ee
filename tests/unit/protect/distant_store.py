# SPDX-License-Identifier: Apache-2.0
"""A launcher's store whose connections are lost, shared by the tests of what goes on then."""

import contextlib
import socket
import threading
from datetime import timedelta

from torch.distributed import TCPStore


class DistantStore:
    """A real store, and a way to it that can be cut."""

    def __init__(self) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self._listener = socket.create_server(('127.0.0.1', 0))
        self._open: list[socket.socket] = []
        self._up = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                if not self._up:
                    near.close()
                    continue
                far = socket.create_connection(('127.0.0.1', self.store.port))
                self._open += [near, far]
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)

    def connect(self, timeout: timedelta) -> TCPStore:
        """A connection that takes that way."""
        port = self._listener.getsockname()[1]
        return TCPStore('127.0.0.1', port, is_master=False, timeout=timeout)

    def cut(self) -> None:
        self._up = False
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def repair(self) -> None:
        self._up = True
