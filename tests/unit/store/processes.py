# SPDX-License-Identifier: Apache-2.0
"""A store, and the leader of a node, as processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
from torch.distributed import TCPStore

WAIT_S = 120.0
_SERVES = """
import signal, sys
from torch.distributed import TCPStore
store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False)
print(store.port, flush=True)
while store:
    signal.pause()
"""
_LEADS = """
import json, signal, sys
from moevement_ext.store import leader
from moevement_ext.store.node_leader import NodeLeader
leader._ASKED_EVERY_S, leader._TO_ANSWER_S = json.loads(sys.argv[2])
node = NodeLeader('127.0.0.1', int(sys.argv[1]))
print(node.port, flush=True)
print(json.dumps(node.variables), flush=True)
signal.pause()
"""


class _Process:
    def __init__(self, program: str, *arguments: object) -> None:
        command = [sys.executable, '-c', program, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self.port = int(self.output.readline())

    def connect(self, timeout_s: float = WAIT_S) -> TCPStore:
        timeout = timedelta(seconds=timeout_s)
        return TCPStore('127.0.0.1', self.port, is_master=False, timeout=timeout)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def connections_from_clients(self) -> int:
        """How many are open at its own port."""
        found = psutil.Process(self._process.pid).net_connections()
        return sum(
            one.laddr.port == self.port and one.status == psutil.CONN_ESTABLISHED for one in found
        )

    def connections_to(self, port: int) -> int:
        """How many are open."""
        found = psutil.Process(self._process.pid).net_connections()
        return sum(
            bool(one.raddr) and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED
            for one in found
        )

    def stand_still(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # until then it may answer

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Server(_Process):
    """Serves a store."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(_SERVES, port)


class Leader(_Process):
    """Leads to the store at a port, which it asks so often for an answer in so many seconds."""

    def __init__(self, port: int, every_s: float = WAIT_S, to_answer_s: float = WAIT_S) -> None:
        super().__init__(_LEADS, port, [every_s, to_answer_s])
        self.variables: dict[str, str] = json.loads(self.output.readline())


def until(holds: Callable[[], bool]) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
