# SPDX-License-Identifier: Apache-2.0
"""A connection with the launcher's store, of a node's leader. On its thread only."""

import asyncio
import secrets
from asyncio import Future, StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable

from moevement_ext.store import wire
from moevement_ext.store.wire import Kind, Request


class Line:
    """The store answers in the order in which it is asked; many questions can be under way.

    Args:
        reader, writer: of the connection.
        on_lost: called once it is lost, unless it was closed.
    """

    def __init__(
        self, reader: StreamReader, writer: StreamWriter, on_lost: Callable[[], None]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_lost = on_lost
        self._asked: deque[tuple[Request, Future[bytes]]] = deque()
        self._unsent: list[bytes] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, host: str, port: int, on_lost: Callable[[], None]) -> 'Line':
        """Connect to the store, as a client of it does.

        Raises:
            OSError: that is not possible.
        """
        line = cls(*await asyncio.open_connection(host, port), on_lost)
        try:
            line.tell(Request(Kind.VALIDATE, number=wire.MAGIC))
            await line.ask(Request(Kind.PING, number=secrets.randbits(32)))
        except BaseException:
            line.close()
            raise
        return line

    def tell(self, request: Request) -> None:
        """Send what is not answered; what is to be sent in one turn of the loop goes together."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(wire.encoded(request))

    def _send(self) -> None:
        self._writer.write(b''.join(self._unsent))
        self._unsent.clear()

    async def ask(self, request: Request) -> bytes:
        """What the store answers.

        Raises:
            ConnectionError: the connection is lost; the store may have done what it was asked.
        """
        if self._reading.done():
            raise ConnectionError('the connection with the store is lost')
        answer: Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked.append((request, answer))
        self.tell(request)
        return await answer

    def close(self) -> None:
        """Whoever still waits for an answer has an error."""
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            while True:
                begun = await self._reader.readexactly(1)
                request, answer = self._asked[0]
                found = await wire.read_answer(request, self._reader, begun)
                self._asked.popleft()
                if not answer.done():
                    answer.set_result(found)
        except (OSError, EOFError, ValueError, IndexError):  # or it does not speak as expected
            self._on_lost()
        finally:
            self._writer.close()
            for _, answer in self._asked:
                if not answer.done():
                    answer.set_exception(ConnectionError('the connection with the store is lost'))
