# SPDX-License-Identifier: Apache-2.0
"""The leaders of the nodes of a job without training, and branches of its store.

Each is a process, which counts what it asks.
"""

import asyncio
import multiprocessing
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from torch.distributed import TCPStore

from moevement_ext.store import wire
from moevement_ext.store.branches import announce
from moevement_ext.store.leader import Leader
from moevement_ext.store.line import Line
from moevement_ext.store.node_leader import NodeLeader
from moevement_ext.store.wire import Kind, Reading, Request
from tools.bench.control_plane_members import Tally, Traffic

_GREETING = {Kind.VALIDATE, Kind.PING}
"""Not counted with ranks that connect themselves, either."""


class Leaders:
    """One for each node, until closed.

    Args:
        port: of the store.
        nodes: how many there are.
        branches: through how many the leaders ask; 0: each asks the store.

    Attributes:
        ports: where each serves, by node.
    """

    def __init__(self, port: int, nodes: int, branches: int = 0) -> None:
        self._branches = [_started(_branch_off, port) for _ in range(branches)]
        announce(
            TCPStore('localhost', port, is_master=False), [pipe.recv() for pipe in self._branches]
        )
        self._leaders = [_started(_lead, port) for _ in range(nodes)]
        self.ports: list[int] = [pipe.recv() for pipe in self._leaders]

    def traffic(self) -> Traffic:
        """What has been sent to the store and received, by branches if there are some."""
        asking = self._branches or self._leaders
        for pipe in asking:
            pipe.send('traffic')
        return sum((pipe.recv() for pipe in asking), Traffic())

    def close(self) -> None:
        """End them."""
        for pipe in (*self._leaders, *self._branches):
            pipe.send('end')


def _started(process: Callable[[int, Connection], None], port: int) -> Connection:
    context = multiprocessing.get_context('forkserver')
    ours, theirs = context.Pipe()
    context.Process(target=process, args=(port, theirs), daemon=True).start()
    return ours


def _lead(port: int, pipe: Connection) -> None:
    """A process."""
    tally = Tally()
    _count(tally)
    leader = NodeLeader('localhost', port)
    pipe.send(leader.port)
    while pipe.recv() == 'traffic':
        pipe.send(tally.read())
    leader.close()


def _branch_off(port: int, pipe: Connection) -> None:
    """A process."""
    tally = Tally()
    _count(tally)
    listening = socket.create_server(('localhost', 0), backlog=1024)
    branch = Leader('localhost', port, listening, is_branch=True)
    threading.Thread(target=lambda: asyncio.run(branch.serve(asyncio.Event())), daemon=True).start()
    pipe.send(listening.getsockname()[1])
    while pipe.recv() == 'traffic':
        pipe.send(tally.read())


def _count(tally: Tally) -> None:
    """Have all lines of this process counted."""
    tell, read_answer = Line.tell, wire.read_answer

    def counted(line: Line, request: Request) -> None:
        if request.kind not in _GREETING:
            tally.add(1, request.keys, request.values)
        tell(line, request)

    def counted_answer(request: Request) -> Reading[bytes]:
        answer = yield from read_answer(request)
        if request.kind not in _GREETING:
            is_value = request.kind in (Kind.GET, Kind.COMPARE_SET)
            tally.add(0, *([[], [answer]] if is_value else [[answer]]))
        return answer

    Line.tell = counted  # type: ignore[method-assign, assignment]
    wire.read_answer = counted_answer
