# SPDX-License-Identifier: Apache-2.0
"""Counts arrivals in the store: 16 ranks share a counter, each rank has three of its bits.

The rank that completes a counter also counts the completed counters, so the arrival of all ranks
costs one request per rank, and a search for missing ranks one per counter. Several processes may
claim the same rank; the rank's bits show which process was the first.
"""

from typing import NamedTuple

from torch.distributed import Store

from moevement_ext.store.peek import peek

_RANKS_OF_A_COUNTER = 16
# Bits of one rank: enough for seven processes, as each one after the first ends the round.
_BITS = 3
_MOST = (1 << _BITS) - 1
_SPREAD = 8


class RankArrival(NamedTuple):
    """What a process learns when it signs for its rank."""

    is_first: bool
    """No other process has signed for the rank."""
    order: int
    """Position among the ranks of its counter that have arrived, from 1."""
    is_last: bool
    """The rank is the last of all ranks to arrive."""
    is_spread: bool
    """The rank's counter is one of at most fifteen that are spread evenly over all counters."""


def sign(store: Store, name: str, rank: int, world_size: int) -> RankArrival:
    """Record that `rank` has arrived at `name`; a process calls this once per name."""
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
    """Key of a rank's report in a round."""
    return f'join/{round}/{rank}'


def has_signed(store: Store, name: str, rank: int) -> bool:
    """True if a process has signed for this rank."""
    found = peek(store, _counter(name, rank // _RANKS_OF_A_COUNTER))
    return _processes(int(found or 0), rank) > 0


def missing(store: Store, name: str, world_size: int) -> list[int]:
    """Ranks that have not arrived, in ascending order."""
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
