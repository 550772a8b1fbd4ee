# SPDX-License-Identifier: Apache-2.0
"""A store and the proxy of a node, as separate processes."""

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
from torch.distributed import TCPStore

from moevement_ext.store import proxy
from moevement_ext.store.node_proxy import NodeProxy
from tests.distributed.harness.ports import free_port
from tests.unit.forks import context

WAIT_S = 120.0


class _Process(ABC):
    """A process that listens on a port."""

    port: int
    pid: int

    def connect(self, timeout_s: float = WAIT_S) -> TCPStore:
        timeout = timedelta(seconds=timeout_s)
        return TCPStore('127.0.0.1', self.port, is_master=False, timeout=timeout)

    def connections_from_clients(self) -> int:
        """Number of open connections to its own port."""
        found = psutil.Process(self.pid).net_connections()
        return sum(
            one.laddr.port == self.port and one.status == psutil.CONN_ESTABLISHED for one in found
        )

    def connections_to(self, port: int) -> int:
        """Number of its open connections to this port."""
        found = psutil.Process(self.pid).net_connections()
        return sum(
            bool(one.raddr) and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED
            for one in found
        )

    def stand_still(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        process = psutil.Process(self.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED)  # it may answer before

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @abstractmethod
    def close(self) -> None:
        """Kill the process."""


class _Forked(_Process):
    """Runs a function that sends its identification, its port first."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        ours, theirs = context().Pipe()
        self._process = context().Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert ours.poll(WAIT_S)
        self.port, *self._known_by = ours.recv()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class Server(_Forked):
    """Serves a store, on a port that no other program takes after its death."""

    def __init__(self, port: int | None = None) -> None:
        super().__init__(_serve, port or free_port())


def _serve(pipe: Connection, port: int) -> None:
    store = TCPStore('127.0.0.1', port, is_master=True, wait_for_workers=False)
    pipe.send([store.port])
    while store:
        signal.pause()


class Proxy(_Forked):
    """Proxy to the store at a port, pinged every `every_s` with a timeout of `to_answer_s`.

    The store has `to_connect_s` to answer a new connection, and a client `greeting_s` to greet.
    """

    def __init__(
        self,
        port: int,
        every_s: float = WAIT_S,
        to_answer_s: float = WAIT_S,
        to_connect_s: float = WAIT_S,
        greeting_s: float = proxy.GREETING_S,
    ) -> None:
        times = every_s, to_answer_s, to_connect_s
        super().__init__(_lead, port, greeting_s, *times)
        self.variables: dict[str, str] = self._known_by[0]


def _lead(pipe: Connection, port: int, greeting_s: float, *times: float) -> None:
    proxy.GREETING_S = greeting_s
    proxy._ASKED_EVERY_S, proxy._TO_ANSWER_S, proxy._TO_CONNECT_S = times
    node = NodeProxy('127.0.0.1', port)
    pipe.send([node.port, node.variables])
    signal.pause()


def until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
