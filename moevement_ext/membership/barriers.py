# SPDX-License-Identifier: Apache-2.0
"""Barriers: keys of the store whose creation wakes up all waiting ranks.

A waiting rank sends no requests. The last rank to arrive opens the barrier, or the process that
ends the round closes it. Whichever comes first is final: no rank passes a barrier that another rank
has found closed. A store wakes up only the ranks that wait for a key of a given name, so a round's
barriers have fixed names.
"""

import time
from datetime import timedelta

from torch.distributed import DistStoreError, Store

_OPEN, _SHUT = 'open', 'shut'
# The process that should close the barrier may have died, so a wait is not unlimited. Torch logs a
# warning after each wait.
_LONGEST_WAIT_S = 60.0
_SHORTEST_WAIT_S = 0.01


def open_barrier(store: Store, barrier: str) -> None:
    """Let all ranks pass, unless the barrier is shut."""
    store.compare_set(barrier, '', _OPEN)


def close_barrier(store: Store, barrier: str) -> None:
    """Let no rank pass, unless the barrier is already open."""
    store.compare_set(barrier, '', _SHUT)


def has_moved(store: Store, barrier: str, deadline: float) -> bool:
    """Wait until a barrier is opened or shut; False if neither happens in time.

    No other thread can use this connection meanwhile. The wait ends at `deadline` (by
    `time.monotonic`), or after a minute.
    """
    left_s = min(max(deadline - time.monotonic(), _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
    try:
        store.wait([barrier], timedelta(seconds=left_s))
    except DistStoreError:
        return False
    return True


def is_open(found: bytes | None) -> bool:
    """True if `found` is the value of an open barrier; None: its round's keys are deleted."""
    return found == _OPEN.encode()
