# SPDX-License-Identifier: Apache-2.0
"""Who has come, in the store: a counter for some ranks, to which each adds a bit of its own.

Ranks of a node that come together can add theirs together (`store.combining`). Who fills a counter
counts it, for all of its ranks: so that all have come costs each rank one request.
"""

from typing import NamedTuple

from torch.distributed import Store

from moevement_ext.store.peek import peek

_RANKS_OF_A_COUNTER = 32
_SPREAD = 8


class Arrival(NamedTuple):
    """What a rank finds that says that it has come."""

    order: int
    """1 for the first of the ranks of its counter, 2 for the next."""
    is_last: bool
    """It is the last of all ranks."""
    is_spread: bool
    """It signs one of at most fifteen counters, which are spread over all."""


def sign(store: Store, name: str, rank: int, world_size: int) -> Arrival:
    """Say that a rank has come; once only.

    Args:
        store: the launcher's.
        name: of what it has come to.
        rank: which.
        world_size: number of ranks that are to come.
    """
    place, bit = divmod(rank, _RANKS_OF_A_COUNTER)
    counters = -(-world_size // _RANKS_OF_A_COUNTER)
    ranks = min(world_size - place * _RANKS_OF_A_COUNTER, _RANKS_OF_A_COUNTER)
    bits = store.add(_counter(name, place), 1 << bit)
    is_full = bits == (1 << ranks) - 1
    is_last = is_full and store.add(f'{name}/full', 1) == counters
    is_spread = place % max(counters // _SPREAD, 1) == 0
    return Arrival(bits.bit_count(), is_last, is_spread)


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
