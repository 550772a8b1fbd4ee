# SPDX-License-Identifier: Apache-2.0
"""Connected clients of a proxy. They are anonymous: the store's protocol has no names.

So each gets a bounded part of the process that it is in, which starts workers, too.
"""

import resource
from collections.abc import Callable
from typing import Protocol

GREETING_S = 10.0
MOST_STRANGERS = 64
"""Connections that have not greeted yet; the oldest gives way, so that ranks always get in."""
MOST_BYTES_OWED = 64 << 20
"""Answers that a client has not read."""
MOST_QUESTIONS = 1 << 14
"""What one client may have under way: a rank has one, a proxy those of its ranks."""


def room(share: int) -> int:
    """One `share`th of the descriptors that this process may have, and some at least."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // share, 2 * MOST_STRANGERS)


class Client(Protocol):
    """A connection."""

    def close(self) -> None:
        """Cut it."""


class Clients[Kind: Client]:
    """All connections of a proxy. On its thread.

    Args:
        later: calls something after some seconds, as a loop does.
    """

    def __init__(self, later: Callable[[float, Callable[[Kind], None], Kind], object]) -> None:
        self._later = later
        self._most = room(2)
        self._all: dict[Kind, None] = {}
        self._strangers: dict[Kind, None] = {}

    def came(self, client: Kind) -> None:
        """It has connected, and is cut if there is no room for it, or if it does not greet."""
        self._all[client] = self._strangers[client] = None
        if len(self._all) > self._most:
            client.close()
        elif len(self._strangers) > MOST_STRANGERS:
            next(iter(self._strangers)).close()
        self._later(GREETING_S, self._expire, client)

    def greeted(self, client: Kind) -> None:
        """It speaks as a client of a store does."""
        self._strangers.pop(client, None)

    def left(self, client: Kind) -> None:
        """It is gone."""
        self._all.pop(client, None)
        self._strangers.pop(client, None)

    def cut_all(self) -> None:
        """All are to connect anew."""
        for client in list(self._all):
            client.close()

    def _expire(self, client: Kind) -> None:
        if client in self._strangers:
            client.close()
