# SPDX-License-Identifier: Apache-2.0
"""Coordinators in the process of a test."""

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any

from moevement_ext.coordinator.coordinator import Coordinator


class Served:
    """A coordinator in this process, on a thread; `stop` ends it as a crash would."""

    def __init__(self, listening: socket.socket, secret: bytes, **more: Any) -> None:
        self.coordinator = Coordinator(secret, b'+'.join, **more)
        self.loop = asyncio.new_event_loop()
        self._task = self.loop.create_task(self.coordinator.serve(listening))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._task)
        self.loop.run_until_complete(self._end())
        self.loop.close()

    @staticmethod
    async def _end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        with suppress(RuntimeError):  # it was stopped before
            self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


class KeptHere:
    """In place of `Keeper`: no process of its own; `restart` ends one and starts the next."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._listening = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = (host, self._listening.getsockname()[1])
        self._secret = secret
        self._start()

    def _start(self) -> None:
        self.served = Served(self._listening, self._secret, leads=False)

    def restart(self) -> None:
        self.served.stop()
        self._start()

    def close(self) -> None:
        self.served.stop()
        self._listening.close()
