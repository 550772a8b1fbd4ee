# SPDX-License-Identifier: Apache-2.0
"""Eviction: other ranks ask the launcher, through its store, to kill a hanging rank.

Keys of a launch: `evict/<rank>` (the process number), and `evictions`, the number of requests. A
launcher reads this number several times a second, and the keys of its ranks only when it has
changed.
"""

from torch.distributed import Store

from moevement_ext.membership.launch import of_launch, own_launch

_COUNT = 'evictions'


def evict(store: Store, rank: int, process: int, launch: str | None = None) -> None:
    """Ask the launcher of a hanging rank to kill this process.

    `store` belongs to the job; `launch` is the launch of that process, None for the present one.
    """
    store = of_launch(store, own_launch() if launch is None else launch)
    store.set(_key(rank), str(process))
    store.add(_COUNT, 1)


def evictions(store: Store) -> int:
    """Number of requests so far; costs one store request.

    Called by the launcher, with the part of the store of its launch.
    """
    return store.add(_COUNT, 0)


def take_eviction(store: Store, rank: int) -> int | None:
    """Remove and return the number of the process to kill, if any. Called by the launcher."""
    if not store.check([_key(rank)]):
        return None
    process = int(store.get(_key(rank)))
    store.delete_key(_key(rank))
    return process


def _key(rank: int) -> str:
    return f'evict/{rank}'
