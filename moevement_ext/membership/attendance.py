# SPDX-License-Identifier: Apache-2.0
"""Who has come, in the store: a counter for some ranks, to which each adds a bit of its own.

Ranks of a node that come together can add theirs together (`store.combining`).
"""

from torch.distributed import Store

from moevement_ext.store.peek import peek

_RANKS_OF_A_COUNTER = 32


def sign(store: Store, name: str, rank: int) -> None:
    """Say that a rank has come; once only.

    Args:
        store: the launcher's.
        name: of what it has come to.
        rank: which.
    """
    place, bit = divmod(rank, _RANKS_OF_A_COUNTER)
    store.add(_counter(name, place), 1 << bit)


def missing(store: Store, name: str, world_size: int) -> list[int]:
    """Ranks that have not said so, in order."""
    found = []
    for place in range(-(-world_size // _RANKS_OF_A_COUNTER)):
        bits = int(peek(store, _counter(name, place)) or 0)
        first = place * _RANKS_OF_A_COUNTER
        ranks = range(first, min(first + _RANKS_OF_A_COUNTER, world_size))
        found += [rank for rank in ranks if not bits >> (rank - first) & 1]
    return found


def _counter(name: str, place: int) -> str:
    return f'{name}/{place}'
