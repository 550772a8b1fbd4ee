# SPDX-License-Identifier: Apache-2.0
"""Messages about failures between the launcher and the workers, in the store.

A `store` is the part of a launch. The launcher writes `ended/<process>` (time and cause of the
death of this process), `cause` (the same for the death that restarted all workers, with the number
of that restart) and `spares` (the remaining spares). The workers write `recovered` (one line about
the outcome of the newest recovery).
"""

import time
from typing import NamedTuple

from torch.distributed import Store

_RECOVERED = 'recovered'
_CAUSE = 'cause'
_SPARES = 'spares'


class End(NamedTuple):
    """The death of a process, as its launcher saw it."""

    at: float
    """Seconds since the epoch."""
    rank: int
    how: str
    """For example `was killed by SIGKILL`."""


def tell_end(store: Store, process: int, rank: int, how: str) -> None:
    """Record a death that the launcher saw; the rank or the whole job is about to restart."""
    store.set(_ended(process), _encoded(rank, how))


def told_end(store: Store, process: int) -> End | None:
    """How this process died; None if the launcher has not recorded it."""
    return _decoded(store, _ended(process))


def tell_cause(store: Store, restarts: int, rank: int, how: str) -> None:
    """Record that this death causes the restart of all workers, number `restarts`."""
    store.set(_CAUSE, f'{restarts} {_encoded(rank, how)}')


def told_cause(store: Store, restarts: int) -> End | None:
    """The death that caused restart number `restarts` of all workers; None if unknown."""
    return _decoded(store, _CAUSE, f'{restarts} ')


def tell_spares(store: Store, left: str) -> None:
    """Record, in words, the spares that can replace the next lost worker or node."""
    store.set(_SPARES, left)


def told_spares(store: Store) -> str:
    return store.get(_SPARES).decode() if store.check([_SPARES]) else ''


def tell_recovered(store: Store, line: str) -> None:
    """Record the outcome of a recovery in one line; called by one rank."""
    store.set(_RECOVERED, line)


def told_recovered(store: Store) -> str:
    """Outcome of the newest recovery; empty if there was none."""
    return store.get(_RECOVERED).decode() if store.check([_RECOVERED]) else ''


def _encoded(rank: int, how: str) -> str:
    return f'{time.time():.3f} {rank} {how}'


def _decoded(store: Store, key: str, prefix: str = '') -> End | None:
    if not store.check([key]):
        return None
    text = store.get(key).decode()
    if not text.startswith(prefix):
        return None
    at, rank, how = text.removeprefix(prefix).split(' ', 2)
    return End(float(at), int(rank), how)


def _ended(process: int) -> str:
    return f'ended/{process}'
