# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the Prometheus page, on the event loop of the calling thread.

The port is open to every client that can reach the host, and this process trains. So descriptors,
bytes and time per client are bounded, and clients get no threads. At the connection limit a new
connection closes the oldest, so that Prometheus can always connect.
"""

import asyncio
import logging
import os
import socket
import weakref
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 16
"""Limit of simultaneous connections; Prometheus needs one."""
_BACKLOG = 64
_MOST_REQUEST_BYTES = 8192
_REQUEST_S = 5.0
# Limit for sending a page to a slow client.
_ANSWER_S = 20.0

Page = Callable[[str], tuple[str, bytes]]
"""Maps the `Accept` header of a request to content type and content."""


async def serve(port: int, page: Page) -> asyncio.Server:
    """Answer every GET on all interfaces of this host with the page, until the server closes.

    Raises `OSError` if another process has the port.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listening = socket.create_server(('', port), family=family, dualstack_ipv6=both)
    _LISTENING.add(listening)
    open_ = dict[StreamWriter, None]()  # oldest first

    async def attend(reader: StreamReader, writer: StreamWriter) -> None:
        while len(open_) >= MOST_CONNECTIONS:
            oldest = next(iter(open_))
            del open_[oldest]
            oldest.transport.abort()
        open_[writer] = None
        try:
            await _answer(reader, writer, page)
        except (OSError, EOFError, asyncio.LimitOverrunError):  # includes timeouts of slow clients
            pass
        except Exception:  # costs one scrape, not the training
            logger.exception('the metrics could not be shown')
        finally:
            open_.pop(writer, None)
            writer.transport.abort()

    return await asyncio.start_server(
        attend, sock=listening, limit=_MOST_REQUEST_BYTES, backlog=_BACKLOG
    )


async def _answer(reader: StreamReader, writer: StreamWriter, page: Page) -> None:
    async with asyncio.timeout(_REQUEST_S):
        head = await reader.readuntil(b'\r\n\r\n')
    request, *lines = head.decode('latin-1').split('\r\n')
    status, kind, content = '405 Method Not Allowed', 'text/plain', b''
    if request.split(' ')[0] == 'GET':
        fields = (line.partition(':') for line in lines)
        accepted = next((value for name, _, value in fields if name.lower() == 'accept'), '')
        status, (kind, content) = '200 OK', page(accepted.strip())
    writer.write(
        f'HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n'
        'Connection: close\r\n\r\n'.encode('latin-1')
        + content
    )
    async with asyncio.timeout(_ANSWER_S):
        await writer.drain()
        writer.close()
        await writer.wait_closed()


# Data loader workers that outlive a killed trainer for a moment would keep the port.
_LISTENING: 'weakref.WeakSet[socket.socket]' = weakref.WeakSet()


def _stop_listening() -> None:
    for listening in list(_LISTENING):
        listening.close()


os.register_at_fork(after_in_child=_stop_listening)
