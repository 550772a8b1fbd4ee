# SPDX-License-Identifier: Apache-2.0
"""How to end a thread that may be within an exchange with a peer, or about to begin one."""

import threading
import time
from collections.abc import Callable

_SECONDS = 5.0  # only a connection that is just being opened keeps the thread longer
_AGAIN_SECONDS = 0.1


def join_interrupted(thread: threading.Thread, interrupt: Callable[[], None]) -> None:
    """Wait for a thread that was told to end, but not for long.

    Args:
        thread: the thread.
        interrupt: cuts off the exchange it is in; called again and again, as a connection may
            just have been opened when it was interrupted.
    """
    expires = time.monotonic() + _SECONDS
    while thread.is_alive() and time.monotonic() < expires:
        interrupt()
        thread.join(_AGAIN_SECONDS)
