# SPDX-License-Identifier: Apache-2.0
"""Arrivals in the store: some ranks share a counter, and each counts in some of its bits.

Ranks of a node that arrive at the same time add theirs in one request (`store.combining`). The rank
that fills a counter counts the counter, so the arrival of all ranks costs each rank one request.
Several processes may claim the same rank; its bits tell which of them was the first.
"""

from typing import NamedTuple

from torch.distributed import Store

from moevement_ext.store.peek import peek

_RANKS_OF_A_COUNTER = 16
# Those of one rank: for seven processes, each of which ends what the rank has come to.
_BITS = 3
_MOST = (1 << _BITS) - 1
_SPREAD = 8


class RankArrival(NamedTuple):
    """What a process learns when it says that its rank has come."""

    is_first: bool
    """No other process of the rank has."""
    order: int
    """1 for the first of the ranks of its counter, 2 for the next."""
    is_last: bool
    """It is the last of all ranks."""
    is_spread: bool
    """It counts in one of at most fifteen counters, which are spread over all."""


def sign(store: Store, name: str, rank: int, world_size: int) -> RankArrival:
    """Say that `rank` has come to what `name` names; once only in a process."""
    place = rank // _RANKS_OF_A_COUNTER
    counters = -(-world_size // _RANKS_OF_A_COUNTER)
    ranks = _ranks(place, world_size)
    counter = store.add(_counter(name, place), 1 << _shift(rank))
    is_first = _processes(counter, rank) == 1
    order = sum(_processes(counter, one) > 0 for one in ranks)
    is_full = is_first and order == len(ranks)
    is_last = is_full and store.add(f'{name}/full', 1) == counters
    is_spread = place % max(counters // _SPREAD, 1) == 0
    return RankArrival(is_first, order, is_last, is_spread)


def place_in(round: int, rank: int) -> str:
    """Key of what a rank brings to a round."""
    return f'join/{round}/{rank}'


def has_signed(store: Store, name: str, rank: int) -> bool:
    """True if a process of this rank has come."""
    found = peek(store, _counter(name, rank // _RANKS_OF_A_COUNTER))
    return _processes(int(found or 0), rank) > 0


def missing(store: Store, name: str, world_size: int) -> list[int]:
    """Ranks that have not come, in order."""
    found = []
    for place in range(-(-world_size // _RANKS_OF_A_COUNTER)):
        counter = int(peek(store, _counter(name, place)) or 0)
        found += [one for one in _ranks(place, world_size) if not _processes(counter, one)]
    return found


def _ranks(place: int, world_size: int) -> range:
    first = place * _RANKS_OF_A_COUNTER
    return range(first, min(first + _RANKS_OF_A_COUNTER, world_size))


def _processes(counter: int, rank: int) -> int:
    return counter >> _shift(rank) & _MOST


def _shift(rank: int) -> int:
    return rank % _RANKS_OF_A_COUNTER * _BITS


def _counter(name: str, place: int) -> str:
    return f'{name}/{place}'
