# SPDX-License-Identifier: Apache-2.0
"""A leader: a store to its clients, which asks the launcher's store for them together.

All ranks of a job do the same at the same time, after a failure above all: without leaders the one
store would be asked by each for the same. A leader understands what torch's clients say (`wire`);
what it does not combine it hands on, and it remembers nothing. When its connection to the store is
lost, so are those of its clients: none takes what a leader does for what the store has done.

Each node has one (`node_leader`), and a large job has some beside the store, which lead those of
the nodes (`branches`).
"""

import asyncio
import logging
import socket
from asyncio import Event, StreamReader, StreamWriter, Task
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from moevement_ext.store import branches, wire
from moevement_ext.store.combining import Questions, Waits
from moevement_ext.store.line import Line
from moevement_ext.store.wire import Kind, Request

logger = logging.getLogger(__name__)

_TO_CONNECT_S = 10.0
_ASKED_EVERY_S = 10.0
_TO_ANSWER_S = 20.0
"""All ranks of a job ask at the same time when they meet."""


class _Store:
    """The connections of a leader to the store, all made anew when one is lost.

    Args:
        line: the first.
        connect: makes another.
    """

    def __init__(self, line: Line, connect: Callable[[], Coroutine[Any, Any, Line]]) -> None:
        self._line = line
        self._questions = Questions(line)
        self.waits = Waits(connect)

    async def answer(self, request: Request) -> bytes:
        """What the client that asks is to be sent."""
        if request.kind == Kind.VALIDATE:
            return _nothing_if_known(request)
        if request.kind == Kind.PING:
            return wire.sign_of_life(request)
        if request.kind in wire.UNANSWERED:
            self._line.tell(request)
            return b''
        return await self._questions.ask(request)

    def close(self) -> None:
        """Cut all."""
        self._line.close()
        self.waits.close()


class _Client:
    """A connection with a rank.

    Args:
        reader, writer: of it.

    Attributes:
        next: its next request, which is read while the one before is answered.
    """

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.next = asyncio.create_task(wire.read_request(reader))

    async def request(self) -> Request:
        """Its next.

        Raises:
            EOFError: it is gone.
            ValueError: it does not speak as torch's clients do.
        """
        request = await self.next
        self.next = asyncio.create_task(wire.read_request(self._reader))
        return request

    async def tell(self, answer: bytes) -> None:
        """Send an answer."""
        self._writer.write(answer)
        await self._writer.drain()

    def close(self) -> None:
        """Cut it."""
        self.next.cancel()
        self._writer.close()


def _nothing_if_known(greeting: Request) -> bytes:
    if greeting.number != wire.MAGIC:
        raise ValueError(f'it begins with {greeting.number:#x}, as no client of a store does')
    return b''


class Leader:
    """Serves on the loop that runs `serve`.

    Args:
        host, port: of the launcher's store; it need not be there yet.
        listening: where clients come.
        is_branch: its clients are leaders; the others ask through one such, if there is one.
    """

    def __init__(
        self, host: str, port: int, listening: socket.socket, is_branch: bool = False
    ) -> None:
        self._host, self._its_port = host, port
        self._listening = listening
        self._is_branch = is_branch
        self._store: _Store | None = None
        self._clients: set[Task[None]] = set()
        self._connecting = asyncio.Lock()

    async def serve(self, ended: Event) -> None:
        """Until that is set; all connections are cut then."""
        server = await asyncio.start_server(self._meet, sock=self._listening)
        watching = asyncio.create_task(self._watch_store())
        await ended.wait()
        watching.cancel()
        server.close()
        self._cut()

    async def _watch_store(self) -> None:
        """Lose one that does not answer: its process stands still, or its machine is gone."""
        while True:
            await asyncio.sleep(_ASKED_EVERY_S)
            if self._store is not None:
                try:
                    async with asyncio.timeout(_TO_ANSWER_S):
                        await self._store.answer(Request(Kind.NUM_KEYS))
                except OSError:
                    self._cut()

    async def _meet(self, reader: StreamReader, writer: StreamWriter) -> None:
        task, client = asyncio.current_task(), _Client(reader, writer)
        assert task is not None
        self._clients.add(task)
        try:
            await self._attend(client)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # it is gone, or the store is
        except ValueError as error:
            logger.warning('sparse checkpointing: a client of a leader is cut: %s', error)
        finally:
            self._clients.discard(task)
            client.close()

    async def _attend(self, client: _Client) -> None:
        store = await self._reach_store()
        while True:
            request = await client.request()
            if request.kind == Kind.WAIT:
                await self._wait(store, client, request)
            elif request.kind == Kind.CANCEL_WAIT:
                await client.tell(wire.CANCELLED)
            else:
                await client.tell(await store.answer(request))

    async def _wait(self, store: _Store, client: _Client, request: Request) -> None:
        """Until the keys are there, or the client gives up or is gone."""
        arrival = asyncio.create_task(store.waits.wait(request.keys))
        try:
            await asyncio.wait({arrival, client.next}, return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                arrival.result()
                await client.tell(wire.ARRIVED)
        finally:
            arrival.cancel()

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
                return _Store(through_it, partial(self._connect, branch))
        return _Store(line, partial(self._connect, self._its_port))

    async def _branch_of(self, line: Line) -> int | None:
        try:
            async with asyncio.timeout(_TO_CONNECT_S):
                return await branches.next_of(line)
        except OSError:  # it does not answer any more
            line.close()
            raise

    async def _connect(self, port: int) -> Line:
        async with asyncio.timeout(_TO_CONNECT_S):
            return await Line.open(self._host, port, self._cut)

    def _cut(self) -> None:
        """Nobody goes on as if the store had been there all the time."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        for task in self._clients:
            task.cancel()
