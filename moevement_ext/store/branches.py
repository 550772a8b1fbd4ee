# SPDX-License-Identifier: Apache-2.0
"""Branches: proxies on the store's host, each of which serves the proxies of some nodes.

So only a few processes, with combined requests, load the store of thousands of nodes. Branches run
on the host of the store, so that the loss of a training node cuts no other node off the store. Each
keeps one core busy during a rendezvous. A node whose branch is lost connects to the store itself.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from moevement_ext.store import wire
from moevement_ext.store.line import Line
from moevement_ext.store.wire import Kind, Request

if TYPE_CHECKING:  # a branch starts without torch
    from torch.distributed import Store

NODES_OF_A_BRANCH = 32
"""Nodes per branch; jobs with more nodes than this have branches."""
_PORTS, _TAKEN = 'branches', 'branches/taken'
_NONE = b'\0'
_PROGRAM = 'moevement_ext.store.branch'


def needed(nodes: int) -> int:
    """Number of branches of a job with `nodes` nodes."""
    return -(-nodes // NODES_OF_A_BRANCH) if nodes > NODES_OF_A_BRANCH else 0


async def next_of(line: Line) -> int | None:
    """The port of the branch that the next proxy uses; None if the store has no branches.

    Raises `ConnectionError` as `Line.ask`.
    """
    ports = (await line.ask(Request(Kind.COMPARE_SET, (_key(_PORTS),), (_NONE, _NONE))))[8:]
    if ports == _NONE:
        return None
    taken = wire.number_in(await line.ask(Request(Kind.ADD, (_key(_TAKEN),), number=1)))
    return int(ports.split()[taken % len(ports.split())])


def announce(store: 'Store', ports: Sequence[int]) -> None:
    """Publish the branches of a store for the proxies; called before any proxy connects."""
    if ports:
        store.set(_PORTS, ' '.join(map(str, ports)))


class Branches:
    """`count` branch processes on this host, until closed; they do not outlive this process.

    The store at `host` and `port` need not be running yet. The branches listen on the address `at`
    (empty: all addresses of this host) and on ports from `first_port` on (0: any free ones), listed
    in `ports`. Raises `OSError` if a branch cannot start or listen.
    """

    def __init__(self, host: str, port: int, count: int, at: str = '', first_port: int = 0) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        try:
            for number in range(count):
                own_port = first_port and first_port + number
                self._processes.append(_start(host, port, at, own_port))
            self.ports = [_port_of(process) for process in self._processes]
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _start(host: str, port: int, at: str, own_port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, '-m', _PROGRAM, host, str(port), at, str(own_port)]
    # The branch ends when this process closes its end of the stdin pipe, or dies.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


def _port_of(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    with suppress(ValueError):
        return int(process.stdout.readline())
    raise OSError('a branch of the store ended as soon as it was started')


def _key(name: str) -> bytes:
    return f'/{name}'.encode()
