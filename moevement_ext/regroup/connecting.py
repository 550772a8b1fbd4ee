# SPDX-License-Identifier: Apache-2.0
"""Connects with other ranks on a thread that is left behind when it takes too long.

Nothing ends it from outside: gloo waits half a minute for a peer that died when it had published
its address, and a NCCL communicator that is being made cannot be aborted yet.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

_POLL_SECONDS = 0.02


def in_time[B](connect: Callable[[], B], timeout: timedelta, interrupted: Callable[[], bool]) -> B:
    """What `connect` returns or raises. Training thread.

    Args:
        connect: called on a thread of its own.
        timeout: for it to return.
        interrupted: true when nobody is to be waited for any more.

    Raises:
        RuntimeError: it did not return in time, or this was interrupted.
    """
    connected: queue.SimpleQueue[tuple[B | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            connected.put((connect(), None))
        except Exception as error:  # raised where it is waited for
            connected.put((None, error))

    threading.Thread(target=run, name='sparse-ckpt-connect', daemon=True).start()
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            backend, error = connected.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if interrupted():
                raise RuntimeError('a backend was interrupted while it was connected') from None
            if time.monotonic() > deadline:
                raise RuntimeError('a backend did not connect in time') from None
            continue
        if error is not None:
            raise error
        assert backend is not None
        return backend
