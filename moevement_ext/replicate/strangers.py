# SPDX-License-Identifier: Apache-2.0
"""Connections whose other side has not proved yet that it is of the job: a bounded number."""

import threading

from moevement_ext.replicate.connection import Connection

MOST = 32
"""The oldest gives way, so that those of the job, who prove it at once, always get in."""
# It does so at once, unless the machine is busy; a refusal might strike one of the job.
_TO_GIVE_WAY_S = 5.0


class Strangers:
    """Each is listened to on a thread of its own. Any thread."""

    def __init__(self) -> None:
        self._threads: dict[Connection, threading.Thread] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, connection: Connection, thread: threading.Thread) -> None:
        """It has come."""
        with self._lock:
            self._threads[connection] = thread

    def forget(self, connection: Connection) -> None:
        """It is gone, or no stranger any more."""
        with self._lock:
            self._threads.pop(connection, None)

    def make_room(self) -> bool:
        """Let the oldest give way if need be; False: there is no room. The accepting thread."""
        with self._lock:
            if len(self._threads) < MOST:
                return True
            oldest, thread = next(iter(self._threads.items()))
        oldest.shutdown()
        thread.join(_TO_GIVE_WAY_S)
        return not thread.is_alive()
