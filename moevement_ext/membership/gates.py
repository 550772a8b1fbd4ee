# SPDX-License-Identifier: Apache-2.0
"""Ranks wait at a gate: a key of the store that wakes all of them up when it is there.

Who waits asks nothing meanwhile. A gate is opened by whoever comes last, or shut by whoever ends
the epoch, and what it is first it remains: nobody passes one at which another was turned away. A
store wakes up only who waits for a certain key, so the gates of an epoch have names that all know.
"""

import time
from datetime import timedelta

from torch.distributed import DistStoreError, Store

from moevement_ext.store.peek import peek

_OPEN = b'open'
_SHUT = b'shut'
_LONGEST_WAIT_S = 60.0
"""Who was to shut the gate may have died before; torch writes a warning after each such wait."""
_SHORTEST_WAIT_S = 0.01


def open_gate(store: Store, gate: str, behind: bytes = b'') -> None:
    """Let all pass, unless it is shut.

    Args:
        store: the launcher's.
        gate: its name.
        behind: what everybody finds who passes.
    """
    store.compare_set(gate, '', _OPEN + behind)  # type: ignore[arg-type]


def shut_gate(store: Store, gate: str) -> None:
    """Turn all away, unless it is open."""
    store.compare_set(gate, '', _SHUT)  # type: ignore[arg-type]


def has_moved(store: Store, gate: str, deadline: float) -> bool:
    """Wait until a gate is opened or shut; False if neither has happened for a while.

    Args:
        store: no other thread can use this connection meanwhile.
        gate: its name.
        deadline: by `time.monotonic`; False then, too.
    """
    left_s = min(max(deadline - time.monotonic(), _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
    try:
        store.wait([gate], timedelta(seconds=left_s))
    except DistStoreError:
        return False
    return True


def behind(store: Store, gate: str) -> bytes | None:
    """What is behind a gate that has moved; None if it is shut, or its epoch is forgotten."""
    found = peek(store, gate)
    return found[len(_OPEN) :] if found is not None and is_open(found) else None


def is_open(found: bytes) -> bool:
    """True if that is the value of a gate that all may pass."""
    return found.startswith(_OPEN)
