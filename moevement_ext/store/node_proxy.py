# SPDX-License-Identifier: Apache-2.0
"""The proxy of a node, through which its ranks send combined requests to the launcher's store.

It runs in the node's agent, not in a worker: torch holds the GIL while it connects, so a client in
the same process would wait forever.
"""

import asyncio
import socket
import threading
from contextlib import suppress

from moevement_ext.store.proxy import Proxy

VARIABLE = 'MOEVEMENT_NODE_PROXY'
"""Environment variable of workers with the address of the store and the port of the proxy."""
_HERE = '127.0.0.1'
_BACKLOG = 1024
_TO_END_S = 10.0


class NodeProxy:
    """Serves clients of this host on a separate thread, until closed.

    Any thread. The launcher's store at `host` and `port` need not be running yet. `variables`
    belong in the environment of the node's workers. Raises `OSError` without a free port.
    """

    def __init__(self, host: str, port: int) -> None:
        listening = socket.create_server((_HERE, 0), backlog=_BACKLOG)
        self.store = host, port
        self.port = int(listening.getsockname()[1])
        self.variables = {VARIABLE: f'{host} {port} {self.port}'}
        self._proxy = Proxy(host, port, listening)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-proxy', daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_TO_END_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._proxy.serve(self._ended))
