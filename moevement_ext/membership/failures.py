# SPDX-License-Identifier: Apache-2.0
"""What launcher and workers tell each other of failures, in the launcher's store.

Keys of the launcher: `ended/<rank>` (process of a rank that it saw die, when and of what), `cause`
(the same of the one for which all were started again, and which start that was), `spares` (what is
left to take the place of the next). Of the workers: `recovered` (how the newest recovery came out,
in a line).
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
    """Such as `was killed by SIGKILL`."""


def tell_end(store: Store, rank: int, pid: int, how: str) -> None:
    """The launcher saw this process die; it or the whole job is about to start again."""
    store.set(_ended(rank), _encoded(rank, pid, how))


def told_end(store: Store, rank: int, pid: int) -> End | None:
    """How process `pid` of `rank` died; None if the launcher has not said."""
    found = _decoded(store, _ended(rank))
    return found if found is not None and found.pid == pid else None


def tell_cause(store: Store, restarts: int, rank: int, pid: int, how: str) -> None:
    """All workers are about to start for the `restarts`-th time again, because of this death."""
    store.set(_CAUSE, f'{restarts} {_encoded(rank, pid, how)}')


def told_cause(store: Store, restarts: int) -> End | None:
    """Why all workers were started for the `restarts`-th time again; None if no process said."""
    found = _decoded(store, _CAUSE, f'{restarts} ')
    return found if restarts else None  # a first start has none; an outside store may remember


def tell_spares(store: Store, left: str) -> None:
    """Say in words what can take the place of the next worker or node that is lost."""
    store.set(_SPARES, left)


def told_spares(store: Store) -> str:
    return store.get(_SPARES).decode() if store.check([_SPARES]) else ''


def tell_recovered(store: Store, line: str) -> None:
    """All ranks are back; said once for all of them, in one line."""
    store.set(_RECOVERED, line)


def told_recovered(store: Store) -> str:
    """How the newest recovery came out; empty if there was none."""
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
