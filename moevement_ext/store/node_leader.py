# SPDX-License-Identifier: Apache-2.0
"""The leader of a node: its ranks reach the launcher's store through it, and ask together.

All ranks of a job do the same at the same time, after a failure above all: without leaders the one
store would be asked by each for the same. A leader understands what torch's clients say (`wire`)
and is a store to them; what it does not combine it hands on. When its connection to the store is
lost, so are those of its clients: none takes what a leader does for what the store has done.

It lives in the agent of the node, not in a worker: torch connects with the interpreter's lock held,
so a client in the same process would wait for ever.
"""

import asyncio
import logging
import socket
import threading
from asyncio import StreamReader, StreamWriter, Task
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from moevement_ext.store import wire
from moevement_ext.store.combining import Questions, Waits
from moevement_ext.store.line import Line
from moevement_ext.store.wire import Kind, Request

logger = logging.getLogger(__name__)

VARIABLE = 'MOEVEMENT_NODE_LEADER'
"""In the environment of workers: the address of the store, and the port of the leader."""
_HERE = '127.0.0.1'
_BACKLOG = 1024
_TO_CONNECT_S = 10.0
_ASKED_EVERY_S = 10.0
_TO_ANSWER_S = 20.0
"""All ranks of a job ask at the same time when they meet."""
_TO_END_S = 10.0


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


class NodeLeader:
    """Serves on a thread of its own, on this host only, until closed. Any thread.

    Args:
        host, port: of the launcher's store; it need not be there yet.

    Attributes:
        port: where it serves.
        variables: for the environment of the workers of this node.

    Raises:
        OSError: no port can be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._its_port = host, port
        self._store: _Store | None = None
        self._clients: set[Task[None]] = set()
        self._connecting = asyncio.Lock()
        self._listening = socket.create_server((_HERE, 0), backlog=_BACKLOG)
        self.port = int(self._listening.getsockname()[1])
        self.variables = {VARIABLE: f'{host} {port} {self.port}'}
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-leader', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut all connections."""
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_TO_END_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._meet, sock=self._listening)
        watching = asyncio.create_task(self._watch_store())
        await self._ended.wait()
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
            logger.warning('sparse checkpointing: a client of the node leader is cut: %s', error)
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
                self._store = _Store(await self._connect(), self._connect)
            return self._store

    async def _connect(self) -> Line:
        async with asyncio.timeout(_TO_CONNECT_S):
            return await Line.open(self._host, self._its_port, self._cut)

    def _cut(self) -> None:
        """Nobody goes on as if the store had been there all the time."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        for task in self._clients:
            task.cancel()
