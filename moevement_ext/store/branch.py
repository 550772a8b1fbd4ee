# SPDX-License-Identifier: Apache-2.0
"""The process of a branch; `branches` starts it, and it ends when its standard input is closed.

    python -m moevement_ext.store.branch STORE_HOST STORE_PORT OWN_HOST OWN_PORT

It prints the port that it listens on. An empty OWN_HOST stands for all addresses.
"""

import asyncio
import os
import socket
import sys

from moevement_ext.store.proxy import Proxy
from moevement_ext.system.name_lookups import ask_again_soon

_BACKLOG = 4096
_STDIN = 0


def main() -> None:
    ask_again_soon()
    host, port, own_host, own_port = sys.argv[1:]
    listening = _listen(own_host, int(own_port))
    print(listening.getsockname()[1], flush=True)
    asyncio.run(_serve(host, int(port), listening))


async def _serve(host: str, port: int, listening: socket.socket) -> None:
    ended = asyncio.Event()

    def read() -> None:
        if not os.read(_STDIN, 1):
            ended.set()

    asyncio.get_running_loop().add_reader(_STDIN, read)
    await Proxy(host, port, listening, is_branch=True).serve(ended)


def _listen(host: str, port: int) -> socket.socket:
    if host:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(('', port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


if __name__ == '__main__':
    main()
