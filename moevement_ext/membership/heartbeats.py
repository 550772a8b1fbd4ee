# SPDX-License-Identifier: Apache-2.0
"""Heartbeats in the store: eight ranks share a counter, each rank has seven of its bits.

The request that sends a heartbeat also returns those of the other ranks of the counter. All ranks
of a counter send at the same times, by the clock of their node, and ranks of other counters at
other times.
"""

import time

from torch.distributed import Store

_RANKS_OF_A_COUNTER = 8
# Bits of one rank; all ranks of a counter use fewer than 63, so that it is never negative.
_BITS = 7
_MOST = (1 << _BITS) - 1
# Fraction of a period between one counter and the next; the golden ratio keeps them all apart.
_SPREAD = 0.618
# Twice the longest period between two heartbeats.
_SURELY_HEARD_S = 10.0
_PAUSE_S = 0.2


class Heartbeats:
    """The heartbeats of a rank in a round. Used by one thread."""

    def __init__(self, store: Store, round: int, rank: int) -> None:
        self._store = store
        self._round = round
        self._rank = rank
        self._counter = store.add(_key(round, rank), 0)

    def give(self) -> None:
        # The rank's bits wrap around.
        step = 1 if _part(self._counter, self._rank) < _MOST else -_MOST
        added = step << _shift(self._rank)
        self._counter = self._store.add(_key(self._round, self._rank), added)

    def heard_of(self, rank: int) -> int:
        """A value that changes with each heartbeat of a rank.

        Costs no request for ranks of the same counter, whose value is that of the last `give`.
        """
        if _key(self._round, rank) == _key(self._round, self._rank):
            return _part(self._counter, rank)
        return hear(self._store, self._round, rank)


def hear(store: Store, round: int, rank: int) -> int:
    """A value that changes with each heartbeat of a rank."""
    return _part(store.add(_key(round, rank), 0), rank)


def lives(store: Store, round: int) -> bool:
    """True if one of the first ranks sends a heartbeat in the round; waits for it."""
    before, until = store.add(_key(round, 0), 0), time.monotonic() + _SURELY_HEARD_S
    while (now := store.add(_key(round, 0), 0)) == before and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    return now != before


def turn_of(rank: int, period_s: float) -> tuple[int, float]:
    """Number of a rank's present heartbeat period, and its remaining seconds."""
    later_s = rank // _RANKS_OF_A_COUNTER * _SPREAD % 1.0 * period_s
    number, since_s = divmod(time.monotonic() - later_s, period_s)
    return int(number), period_s - since_s


def _key(round: int, rank: int) -> str:
    return f'beat/{round}/{rank // _RANKS_OF_A_COUNTER}'


def _shift(rank: int) -> int:
    return rank % _RANKS_OF_A_COUNTER * _BITS


def _part(counter: int, rank: int) -> int:
    return counter >> _shift(rank) & _MOST
