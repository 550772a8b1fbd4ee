# SPDX-License-Identifier: Apache-2.0
"""Ranks wait at a barrier: a key of the store that wakes all of them up when it is there.

A waiting rank sends no requests. The last rank to arrive opens the barrier, or the process that
ends the round closes it, and the first of the two is final: no rank passes a barrier that has
turned another one away. A store wakes up only ranks that wait for a key by its name, so all ranks
know the names of a round's barriers.
"""

import time
from datetime import timedelta

from torch.distributed import DistStoreError, Store

from moevement_ext.store.peek import peek

_OPEN = b'open'
_SHUT = b'shut'
# The process that was to close the barrier may have died. Torch logs a warning after each wait.
_LONGEST_WAIT_S = 60.0
_SHORTEST_WAIT_S = 0.01


def open_barrier(store: Store, barrier: str, behind: bytes = b'') -> None:
    """Let all pass, unless the barrier is shut; every passing rank reads `behind`."""
    store.compare_set(barrier, '', _OPEN + behind)  # type: ignore[arg-type]


def close_barrier(store: Store, barrier: str) -> None:
    """Turn all away, unless the barrier is open."""
    store.compare_set(barrier, '', _SHUT)  # type: ignore[arg-type]


def has_moved(store: Store, barrier: str, deadline: float) -> bool:
    """Wait until a barrier is opened or shut; False if neither has happened for a while.

    No other thread can use this connection meanwhile. `deadline` (by `time.monotonic`) ends the
    wait, too.
    """
    left_s = min(max(deadline - time.monotonic(), _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
    try:
        store.wait([barrier], timedelta(seconds=left_s))
    except DistStoreError:
        return False
    return True


def behind(store: Store, barrier: str) -> bytes | None:
    """What is behind a barrier that has moved; None if it is shut, or its round is forgotten."""
    found = peek(store, barrier)
    return found[len(_OPEN) :] if found is not None and is_open(found) else None


def is_open(found: bytes) -> bool:
    """True if that is the value of a barrier that all may pass."""
    return found.startswith(_OPEN)
