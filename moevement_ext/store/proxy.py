# SPDX-License-Identifier: Apache-2.0
"""A proxy: acts as a store, and forwards combined requests of its clients to the launcher's store.

All ranks of a job send the same requests at the same time, above all after a failure; without
proxies the store would have to answer each one. A proxy understands the protocol of torch's clients
(`wire`), forwards requests that it cannot combine, and keeps no data. When it loses its connection
to the store, it closes those of its clients, so that no client takes an action of the proxy for one
of the store.

Each node has a proxy (`node_proxy`), and a large job has further ones on the store's host, which
serve the proxies of the nodes (`branches`).
"""

import asyncio
import logging
import resource
import socket
from asyncio import BaseTransport, Event, Future, Transport
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from moevement_ext.store import branches, wire
from moevement_ext.store.combining import Questions, Waits
from moevement_ext.store.line import Line
from moevement_ext.store.wire import Incoming, Kind, Request

logger = logging.getLogger(__name__)

_TO_CONNECT_S = 10.0
_ASKED_EVERY_S = 10.0
# Batching delay. Without it, requests that arrive one by one from thousands of ranks would rarely
# be combined; each rank waits this long a few times per rendezvous.
_PAUSE_OF_A_BRANCH_S = 0.01
# All ranks send requests at the same time in a rendezvous.
_TO_ANSWER_S = 20.0

# Clients are anonymous, as the store's protocol has no authentication. So each client gets bounded
# resources of this process, which also starts workers.
GREETING_S = 10.0
MOST_STRANGERS = 64
"""Maximum number of connections without a greeting; beyond it the oldest is closed, so that ranks
can always connect."""
MOST_BYTES_OWED = 64 << 20
"""Maximum bytes of answers that a client has not read."""
MOST_QUESTIONS = 1 << 14
"""Maximum number of requests in flight per client: a rank has one, a proxy those of its ranks."""


class _Store:
    """The connections of a proxy to the store; when one is lost, all are replaced."""

    def __init__(
        self, line: Line, connect: Callable[[], Coroutine[Any, Any, Line]], pause_s: float
    ) -> None:
        self._line = line
        self._questions = Questions(line, pause_s)
        self._waits = Waits(connect, _room(4))  # each wait has its own connection

    def answer(self, request: Request) -> Future[bytes] | None:
        """Future of the answer for a client; None if the request has no answer."""
        match request.kind:
            case Kind.PING:
                return _known(wire.heartbeat(request))
            case Kind.CANCEL_WAIT:
                return _known(wire.CANCELLED)
            case Kind.WAIT:
                return self._waits.wait(request.keys)
            case kind if kind in wire.UNANSWERED:
                if self._line.unsent_bytes > MOST_BYTES_OWED:
                    raise ValueError('it sends more than the store accepts')
                self._line.tell(request)
                return None
        return self._questions.ask(request)

    async def give_a_sign(self) -> None:
        """Return when the store has answered."""
        await self._questions.ask(Request(Kind.NUM_KEYS))

    def close(self) -> None:
        self._line.close()
        self._waits.close()


class _Clients:
    """All connections from clients. On the proxy's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = _room(2)
        self._all: dict[_Client, None] = {}
        self._strangers: dict[_Client, None] = {}

    def came(self, client: '_Client') -> None:
        """Add a client; disconnect it if there is no room, or it does not greet in time."""
        self._all[client] = self._strangers[client] = None
        if len(self._all) > self._most:
            client.close()
        elif len(self._strangers) > MOST_STRANGERS:
            next(iter(self._strangers)).close()
        self._loop.call_later(GREETING_S, self._expire, client)

    def greeted(self, client: '_Client') -> None:
        self._strangers.pop(client, None)

    def left(self, client: '_Client') -> None:
        self._all.pop(client, None)
        self._strangers.pop(client, None)

    def cut_all(self) -> None:
        for client in list(self._all):
            client.close()

    def _expire(self, client: '_Client') -> None:
        if client in self._strangers:
            client.close()


class _Client(asyncio.Protocol):
    """A connection from a rank or a proxy; requests are answered in their order.

    A rank waits for each answer before its next request; a proxy has the requests of several ranks
    in flight.
    """

    _transport: Transport

    def __init__(
        self, reach_store: Callable[[], Coroutine[Any, Any, _Store]], clients: _Clients
    ) -> None:
        self._reach_store = reach_store
        self._clients = clients
        self._received = Incoming()
        self._store: _Store | None = None
        # Answers that are not sent yet, in their order.
        self._owed: deque[Future[bytes]] = deque()

    def connection_made(self, transport: BaseTransport) -> None:
        assert isinstance(transport, Transport)
        self._transport = transport
        self._clients.came(self)
        self._beginning = asyncio.create_task(self._begin())

    def data_received(self, data: bytes) -> None:
        self._received.add(data)
        if self._store is not None:
            self._attend(self._store)
        elif len(self._received) > wire.MOST_BYTES_ASKED:  # no rank sends that much at once
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._clients.left(self)
        self._beginning.cancel()
        for answer in self._owed:
            answer.cancel()
        self._owed.clear()

    def close(self) -> None:
        """Close the connection; answers that the client has not read are lost."""
        self._clients.left(self)
        # Otherwise a client that does not read would keep it open.
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()

    async def _begin(self) -> None:
        try:
            self._store = await self._reach_store()
        except OSError:  # the store is unreachable
            self.close()
        else:
            self._attend(self._store)

    def _attend(self, store: _Store) -> None:
        try:
            while self._received and not self._transport.is_closing():
                request = self._received.whole(wire.read_request)
                if request is None:
                    return
                self._take(store, request)
        except ValueError as error:  # the client violates the protocol
            logger.warning('sparse checkpointing: a client of a proxy is cut: %s', error)
            self.close()

    def _take(self, store: _Store, request: Request) -> None:
        if request.kind == Kind.VALIDATE:
            if request.number != wire.MAGIC:
                raise ValueError(
                    f'it begins with {request.number:#x}, unlike any client of a store'
                )
            self._clients.greeted(self)
            return
        if request.kind == Kind.CANCEL_WAIT and self._owed:
            self._owed[-1].cancel()  # has no effect if the wait is over
        answer = store.answer(request)
        if answer is not None:
            self._owed.append(answer)
            answer.add_done_callback(self._tell)
            if len(self._owed) > MOST_QUESTIONS:
                raise ValueError(f'it has {len(self._owed)} requests in flight')

    def _tell(self, answer: Future[bytes]) -> None:
        """Send the answers that are complete, up to the first incomplete one."""
        if not answer.cancelled() and answer.exception() is not None:  # the store is lost
            self.close()
            return
        found: list[bytes] = []
        unread = self._transport.get_write_buffer_size()
        while self._owed and self._owed[0].done():
            first = self._owed.popleft()
            if first.cancelled():  # a wait that was given up
                continue
            if first.exception() is not None:
                break  # its own callback closes the connection
            found.append(first.result())
            unread += len(found[-1])
            if unread > MOST_BYTES_OWED:  # the client does not read
                self.close()
                return
        if found and not self._transport.is_closing():
            self._transport.write(b''.join(found))


def _room(share: int) -> int:
    """One `share`th of this process's file descriptor limit, but at least a minimum."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // share, 2 * MOST_STRANGERS)


def _known(answer: bytes) -> Future[bytes]:
    found: Future[bytes] = asyncio.get_running_loop().create_future()
    found.set_result(answer)
    return found


class Proxy:
    """Serves on the loop that runs `serve`.

    Args:
        host, port: of the launcher's store, which need not be running yet.
        listening: the socket that clients connect to.
        is_branch: its clients are proxies. A proxy that is no branch uses a branch if there is one.
    """

    def __init__(
        self, host: str, port: int, listening: socket.socket, is_branch: bool = False
    ) -> None:
        self._host, self._its_port = host, port
        self._listening = listening
        self._is_branch = is_branch
        self._store: _Store | None = None
        self._clients: _Clients | None = None
        self._connecting = asyncio.Lock()

    async def serve(self, ended: Event) -> None:
        """Serve until `ended` is set; then close all connections."""
        self._clients = clients = _Clients()
        server = await asyncio.get_running_loop().create_server(
            lambda: _Client(self._reach_store, clients), sock=self._listening
        )
        watching = asyncio.create_task(self._watch_store())
        await ended.wait()
        watching.cancel()
        server.close()
        self._cut()

    async def _watch_store(self) -> None:
        """Disconnect from a store that does not answer: it is stopped, or its machine is gone."""
        while True:
            await asyncio.sleep(_ASKED_EVERY_S)
            if self._store is not None:
                try:
                    async with asyncio.timeout(_TO_ANSWER_S):
                        await self._store.give_a_sign()
                except OSError:
                    self._cut()

    async def _reach_store(self) -> _Store:
        async with self._connecting:
            if self._store is None:
                self._store = await self._find_store()
            return self._store

    async def _find_store(self) -> _Store:
        line = await self._connect(self._its_port)
        branch = None if self._is_branch else await self._branch_of(line)
        if branch is not None:
            try:
                through_it = await self._connect(branch)
            except OSError as error:
                logger.warning('sparse checkpointing: no branch of the store is used: %s', error)
            else:
                line.close()
                return _Store(through_it, partial(self._connect, branch), 0.0)
        pause_s = _PAUSE_OF_A_BRANCH_S if self._is_branch else 0.0
        return _Store(line, partial(self._connect, self._its_port), pause_s)

    async def _branch_of(self, line: Line) -> int | None:
        try:
            async with asyncio.timeout(_TO_CONNECT_S):
                return await branches.next_of(line)
        except OSError:  # the store no longer answers
            line.close()
            raise

    async def _connect(self, port: int) -> Line:
        async with asyncio.timeout(_TO_CONNECT_S):
            return await Line.open(self._host, port, self._cut)

    def _cut(self) -> None:
        """Close all connections: no client may continue as if the store had never been lost."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        if self._clients is not None:
            self._clients.cut_all()
