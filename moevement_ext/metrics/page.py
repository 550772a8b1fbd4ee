# SPDX-License-Identifier: Apache-2.0
"""The page that Prometheus reads, served on the calling thread alone.

The port is open to all that reach the host, and the process trains. So whatever connects there gets
a bounded number of descriptors, bytes and seconds, and no thread: of strangers that say nothing the
oldest gives way, so that Prometheus always gets in.
"""

import asyncio
import logging
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 16
"""At a time; Prometheus needs one."""
_BACKLOG = 64
_MOST_REQUEST_BYTES = 8192
_REQUEST_S = 5.0
_ANSWER_S = 20.0
"""For one that reads slowly."""

Page = Callable[[str], tuple[str, bytes]]
"""Content type and content, of the `Accept` of a request."""


def listen(port: int) -> socket.socket:
    """Listen on all interfaces of this host.

    Raises:
        OSError: another process has the port.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(('', port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


class PageServer:
    """Answers every GET with the page.

    Args:
        listening: where; closed at the end.
        page: makes it, on the thread that serves.
    """

    def __init__(self, listening: socket.socket, page: Page) -> None:
        self._listening = listening
        self._page = page
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._open: dict[StreamWriter, None] = {}
        """Oldest first."""

    def serve(self) -> None:
        """Until `stop`. Called once."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def stop(self) -> None:
        """Let `serve` return. Any thread, while it runs or before."""
        try:
            self._loop.call_soon_threadsafe(self._ended.set)
        except RuntimeError:  # it has ended by itself
            pass

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._attend, sock=self._listening, limit=_MOST_REQUEST_BYTES, backlog=_BACKLOG
        )
        await self._ended.wait()
        server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _attend(self, reader: StreamReader, writer: StreamWriter) -> None:
        while len(self._open) >= MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b'\r\n\r\n')
            writer.write(self._answer(head))
            async with asyncio.timeout(_ANSWER_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):  # also of one that is too slow
            pass
        except Exception:  # costs one reading, and not the training
            logger.exception('the metrics could not be shown')
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        request, *lines = head.decode('latin-1').split('\r\n')
        if request.split(' ')[0] != 'GET':
            return _response('405 Method Not Allowed', 'text/plain', b'')
        return _response('200 OK', *self._page(_fields(lines).get('accept', '')))


def _fields(lines: list[str]) -> Mapping[str, str]:
    found = (line.partition(':') for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in found}


def _response(status: str, kind: str, content: bytes) -> bytes:
    head = (
        f'HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n'
        'Connection: close\r\n\r\n'
    )
    return head.encode('latin-1') + content
