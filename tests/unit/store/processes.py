# SPDX-License-Identifier: Apache-2.0
"""A store, as a separate process."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
from torch.distributed import TCPStore

from tests.distributed.harness.ports import free_port
from tests.support.forks import context

WAIT_S = 120.0


class Server:
    """Serves a store, on a port that no other program takes after its death."""

    def __init__(self, port: int | None = None) -> None:
        ours, theirs = context().Pipe()
        arguments = theirs, port or free_port()
        self._process = context().Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        assert ours.poll(WAIT_S)
        self.port = ours.recv()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def connect(self, timeout_s: float = WAIT_S) -> TCPStore:
        timeout = timedelta(seconds=timeout_s)
        return TCPStore('127.0.0.1', self.port, is_master=False, timeout=timeout)

    def stand_still(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        process = psutil.Process(self.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED)  # it may answer before

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, port: int) -> None:
    store = TCPStore('127.0.0.1', port, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while store:
        signal.pause()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
