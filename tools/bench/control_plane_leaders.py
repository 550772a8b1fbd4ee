# SPDX-License-Identifier: Apache-2.0
"""The leaders of the nodes of a job without training: each a process, which counts what it asks."""

import multiprocessing
from asyncio import StreamReader
from multiprocessing.connection import Connection

from moevement_ext.store import wire
from moevement_ext.store.line import Line
from moevement_ext.store.node_leader import NodeLeader
from moevement_ext.store.wire import Kind, Request
from tools.bench.control_plane_members import Tally, Traffic

_GREETING = {Kind.VALIDATE, Kind.PING}
"""Not counted with ranks that connect themselves, either."""


class Leaders:
    """One for each node, until closed.

    Args:
        port: of the store.
        nodes: how many there are.

    Attributes:
        ports: where each serves, by node.
    """

    def __init__(self, port: int, nodes: int) -> None:
        context = multiprocessing.get_context('forkserver')
        self._pipes: list[Connection] = []
        for _ in range(nodes):
            ours, theirs = context.Pipe()
            context.Process(target=_lead, args=(port, theirs), daemon=True).start()
            self._pipes.append(ours)
        self.ports: list[int] = [pipe.recv() for pipe in self._pipes]

    def traffic(self) -> Traffic:
        """What all leaders have sent to the store and received."""
        for pipe in self._pipes:
            pipe.send('traffic')
        return sum((pipe.recv() for pipe in self._pipes), Traffic())

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.send('end')


def _lead(port: int, pipe: Connection) -> None:
    """A process."""
    tally = Tally()
    _count(tally)
    leader = NodeLeader('localhost', port)
    pipe.send(leader.port)
    while pipe.recv() == 'traffic':
        pipe.send(tally.read())
    leader.close()


def _count(tally: Tally) -> None:
    """Have all lines of this process counted."""
    tell, read_answer = Line.tell, wire.read_answer

    def counted(line: Line, request: Request) -> None:
        if request.kind not in _GREETING:
            tally.add(1, request.keys, request.values)
        tell(line, request)

    async def counted_answer(request: Request, reader: StreamReader, begun: bytes) -> bytes:
        answer = await read_answer(request, reader, begun)
        if request.kind not in _GREETING:
            is_value = request.kind in (Kind.GET, Kind.COMPARE_SET)
            tally.add(0, *([[], [answer]] if is_value else [[answer]]))
        return answer

    Line.tell = counted  # type: ignore[method-assign, assignment]
    wire.read_answer = counted_answer
