# SPDX-License-Identifier: Apache-2.0
"""A proxy's connection to the launcher's store. On the thread of the proxy only."""

import asyncio
import secrets
from asyncio import BaseTransport, Future, Transport
from collections import deque
from collections.abc import Callable
from functools import partial

from moevement_ext.store import wire
from moevement_ext.store.wire import Incoming, Kind, Request


class Line(asyncio.Protocol):
    """A pipelined connection: many requests can be in flight, answered in their order.

    `on_lost` is called if the connection is lost, but not after `close`.
    """

    _transport: Transport

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._received = Incoming()
        self._asked: deque[tuple[Request, Future[bytes]]] = deque()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._is_over = False
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, host: str, port: int, on_lost: Callable[[], None]) -> 'Line':
        """Connect and greet as a client of the store does.

        Raises `OSError` if the store is unreachable.
        """
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: cls(on_lost), host, port)
        try:
            line.tell(Request(Kind.VALIDATE, number=wire.MAGIC))
            await line.ask(Request(Kind.PING, number=secrets.randbits(32)))
        except BaseException:
            line.close()
            raise
        return line

    @property
    def unsent_bytes(self) -> int:
        """Approximate number of bytes that are not sent yet."""
        return self._transport.get_write_buffer_size() + self._unsent_bytes

    def tell(self, request: Request) -> None:
        """Send a request without an answer, together with all of this turn of the loop."""
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(wire.encoded(request))
        self._unsent_bytes += len(self._unsent[-1])

    def ask(self, request: Request) -> Future[bytes]:
        """Send a request; returns the future of its answer.

        It fails with `ConnectionError` if the connection is lost; the store may have carried out
        the request.
        """
        answer: Future[bytes] = self._loop.create_future()
        self._asked.append((request, answer))
        if self._is_over:
            self._fail_all()
        else:
            self.tell(request)
        return answer

    def close(self) -> None:
        """Fail all requests that still wait for an answer."""
        self._is_over = True
        self._transport.close()
        self._fail_all()

    def connection_made(self, transport: BaseTransport) -> None:
        assert isinstance(transport, Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received.add(data)
        try:
            while self._received and self._answer_first():
                pass
        except (ValueError, IndexError):  # the store violates the protocol
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_lost()
        self._fail_all()

    def _answer_first(self) -> bool:
        """Resolve the oldest request; False if its answer has not arrived completely."""
        request, answer = self._asked[0]
        found = self._received.whole(partial(wire.read_answer, request))
        if found is None:
            return False
        self._asked.popleft()
        if not answer.done():
            answer.set_result(found)
        return True

    def _send(self) -> None:
        self._transport.write(b''.join(self._unsent))
        self._unsent.clear()
        self._unsent_bytes = 0

    def _fail_all(self) -> None:
        while self._asked:
            _, answer = self._asked.popleft()
            if not answer.done():
                answer.set_exception(ConnectionError('the connection with the store is lost'))
