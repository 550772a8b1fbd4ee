# SPDX-License-Identifier: Apache-2.0
"""Connections with the store that one thread after another uses.

A new one costs lookups of names at both ends and a greeting. After a failure all ranks of a job
would ask for theirs at the same moment, of one store and one name server.
"""

from collections import deque
from collections.abc import Callable

from torch.distributed import Store


class Connections:
    """Those of threads that come and go. Any thread.

    Args:
        connect: opens a connection to the launcher's store.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._idle: deque[Store] = deque()

    def take(self) -> Store:
        """A connection for the calling thread alone, a new one if none is idle.

        Raises:
            DistError: none is, and there is no new one now.
        """
        try:
            return self._idle.popleft()
        except IndexError:
            return self._connect()

    def give_back(self, store: Store) -> None:
        """Let others use a connection from `take` whose last request was answered."""
        self._idle.append(store)
