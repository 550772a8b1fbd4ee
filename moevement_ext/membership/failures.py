# SPDX-License-Identifier: Apache-2.0
"""Messages about failures between the launcher and the workers, in the launcher's store.

The launcher writes `ended/<rank>` (the dead process of a rank, with time and cause of death),
`cause` (the same for the death that restarted all workers, with the number of that restart) and
`spares` (the remaining spares). The workers write `recovered` (one line about the outcome of the
newest recovery).
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
    pid: int
    how: str
    """For example `was killed by SIGKILL`."""


def tell_end(store: Store, rank: int, pid: int, how: str) -> None:
    """Record a death that the launcher saw; the rank or the whole job is about to restart."""
    store.set(_ended(rank), _encoded(rank, pid, how))


def told_end(store: Store, rank: int, pid: int) -> End | None:
    """How process `pid` of `rank` died; None if the launcher has not recorded it."""
    found = _decoded(store, _ended(rank))
    return found if found is not None and found.pid == pid else None


def tell_cause(store: Store, restarts: int, rank: int, pid: int, how: str) -> None:
    """Record that this death causes the restart of all workers, number `restarts`."""
    store.set(_CAUSE, f'{restarts} {_encoded(rank, pid, how)}')


def told_cause(store: Store, restarts: int) -> End | None:
    """The death that caused restart number `restarts` of all workers; None if unknown."""
    found = _decoded(store, _CAUSE, f'{restarts} ')
    # A first start has no cause, but a store outside the launcher may keep an old one.
    return found if restarts else None


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


def _encoded(rank: int, pid: int, how: str) -> str:
    return f'{time.time():.3f} {rank} {pid} {how}'


def _decoded(store: Store, key: str, prefix: str = '') -> End | None:
    if not store.check([key]):
        return None
    text = store.get(key).decode()
    if not text.startswith(prefix):
        return None
    at, rank, pid, how = text.removeprefix(prefix).split(' ', 3)
    return End(float(at), int(rank), int(pid), how)


def _ended(rank: int) -> str:
    return f'ended/{rank}'
