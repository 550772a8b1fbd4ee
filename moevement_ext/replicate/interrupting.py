# SPDX-License-Identifier: Apache-2.0
"""Ends a thread that is in an exchange with a peer, or about to begin one."""

import threading
import time
from collections.abc import Callable

_SECONDS = 5.0  # longer only while the thread opens a connection
_AGAIN_SECONDS = 0.1


def join_interrupted(thread: threading.Thread, interrupt: Callable[[], None]) -> None:
    """Wait a limited time for the end of a stopped thread.

    `interrupt` cuts off its exchange; called repeatedly, as it may just have opened a
    connection.
    """
    expires = time.monotonic() + _SECONDS
    while thread.is_alive() and time.monotonic() < expires:
        interrupt()
        thread.join(_AGAIN_SECONDS)
