# SPDX-License-Identifier: Apache-2.0
"""Ranks that hang are killed by their launcher, which others ask for it in its store.

Keys, of a launch: `evict/<rank>` (the process), and `evictions`, which counts what was asked for: a
launcher looks at this one several times a second, and at those of its ranks only when it has
changed.
"""

from torch.distributed import Store

from moevement_ext.membership.launch import of_launch, own_launch

_COUNT = 'evictions'


def evict(store: Store, rank: int, pid: int, launch: str | None = None) -> None:
    """Have the launcher of a hanging rank kill its process.

    `store` is the job's, `launch` that of the process; None: the present one.
    """
    store = of_launch(store, own_launch() if launch is None else launch)
    store.set(_key(rank), str(pid))
    store.add(_COUNT, 1)


def evictions(store: Store) -> int:
    """How often that was asked for; one request. By the launcher, in the part of its launch."""
    return store.add(_COUNT, 0)


def take_eviction(store: Store, rank: int) -> int | None:
    """The process of a rank that is to be killed, once; None: there is none. By the launcher."""
    if not store.check([_key(rank)]):
        return None
    pid = int(store.get(_key(rank)))
    store.delete_key(_key(rank))
    return pid


def _key(rank: int) -> str:
    return f'evict/{rank}'
