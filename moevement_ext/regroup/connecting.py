# SPDX-License-Identifier: Apache-2.0
"""Connects with other ranks on a thread that is abandoned after a timeout.

No call can end the connecting thread: gloo waits half a minute for a peer that died after
publishing its address, and a NCCL communicator cannot be aborted before it is complete.
"""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from datetime import timedelta

from torch.distributed import Store

_POLL_SECONDS = 0.02


def in_time[B](connect: Callable[[], B], timeout: timedelta, interrupted: Callable[[], bool]) -> B:
    """Run `connect` with a timeout; returns or raises as `connect`. Training thread.

    `connect` runs on a separate thread. Raises `RuntimeError` if it did not return in time, or
    the wait was `interrupted`.
    """
    connected = Future[B]()

    def run() -> None:
        try:
            connected.set_result(connect())
        except Exception as error:  # raised again on the waiting thread
            connected.set_exception(error)

    threading.Thread(target=run, name='sparse-ckpt-connect', daemon=True).start()
    deadline = time.monotonic() + timeout.total_seconds()
    while not wait([connected], _POLL_SECONDS).done:
        if interrupted():
            raise RuntimeError('another failure was announced meanwhile')
        if time.monotonic() > deadline:
            raise RuntimeError('a backend did not connect in time')
    return connected.result()


_TOLD = 'in-use'
_ALL = 'in-use/all'


def used_by_any(
    store: Store, size: int, used: Collection[str], asked: Collection[str], timeout: timedelta
) -> set[str]:
    """The groups of `asked` that any member has used, whose communicators are created at once.

    Collective. Training thread. torch creates a communicator at the first operation of its
    group; most groups of a job never have one. A member that creates it at once would wait for
    a member that leaves it to the first operation, and a new process does not have the list of
    groups that its predecessor used.

    Costs some store requests per member, and one per group. `store` is that of this renewal;
    `used` are the groups that this process has used. Raises `RuntimeError` or `OSError` if a
    report is missing, or the wait was interrupted.
    """
    for name in set(used) & set(asked):
        store.add(f'{_TOLD}/{name}', 1)
    if store.add(_TOLD, 1) == size:
        store.add(_ALL, 1)
    store.wait([_ALL], timeout)
    return {name for name in asked if store.check([f'{_TOLD}/{name}'])}
