# SPDX-License-Identifier: Apache-2.0
"""A bounded number of connections whose peer has not yet proved to belong to the job."""

import threading

from moevement_ext.replicate.connection import Connection

MOST = 32
"""Beyond this number the oldest is closed, so that peers of the job can always connect."""
# Wait for the oldest to close, on a busy machine; a refusal might hit a peer of the job.
_TO_GIVE_WAY_S = 5.0


class Strangers:
    """Unauthenticated connections, each with its own thread. Any thread."""

    def __init__(self) -> None:
        self._threads: dict[Connection, threading.Thread] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, connection: Connection, thread: threading.Thread) -> None:
        with self._lock:
            self._threads[connection] = thread

    def forget(self, connection: Connection) -> None:
        """Remove a connection that ended or is authenticated."""
        with self._lock:
            self._threads.pop(connection, None)

    def make_room(self) -> bool:
        """Close the oldest connection if necessary; False without room. Accepting thread."""
        with self._lock:
            if len(self._threads) < MOST:
                return True
            oldest, thread = next(iter(self._threads.items()))
        oldest.shutdown()
        thread.join(_TO_GIVE_WAY_S)
        return not thread.is_alive()
