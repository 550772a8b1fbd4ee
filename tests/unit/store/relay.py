# SPDX-License-Identifier: Apache-2.0
"""A relay between a proxy and a store."""

import socket
import threading


class Relay:
    """Counts the bytes that the proxy sends."""

    def __init__(self, port: int) -> None:
        self.nbytes = 0
        self._to = port
        self._listening = socket.create_server(('127.0.0.1', 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._listening.accept()
            there = socket.create_connection(('127.0.0.1', self._to))
            for pair in ((here, there, True), (there, here, False)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, come: socket.socket, go: socket.socket, counted: bool) -> None:
        while found := come.recv(1 << 16):
            self.nbytes += counted * len(found)
            go.sendall(found)
