# SPDX-License-Identifier: Apache-2.0
"""Heartbeats in the store: some ranks share a counter, and each counts in some of its bits.

To give a sign is to hear of the other ranks of the counter, in one request; and what ranks of a
node add at the same time is added together (`store.combining`). So they give their heartbeats at
times that are the same for all ranks of a counter, by the clock of their node, and others for
others.
"""

import time

from torch.distributed import Store

_RANKS_OF_A_COUNTER = 8
# Those of one rank; all of a counter are fewer than 63, so that it is never negative.
_BITS = 7
_MOST = (1 << _BITS) - 1
# The part of a turn between one counter and the next: no two of many fall together.
_SPREAD = 0.618


class Heartbeats:
    """Those that a rank gives in a round. One thread."""

    def __init__(self, store: Store, round: int, rank: int) -> None:
        self._store = store
        self._round = round
        self._rank = rank
        self._counter = store.add(_key(round, rank), 0)

    def give(self) -> None:
        step = 1 if _part(self._counter, self._rank) < _MOST else -_MOST  # from the start again
        added = step << _shift(self._rank)
        self._counter = self._store.add(_key(self._round, self._rank), added)

    def heard_of(self, rank: int) -> int:
        """Changes with each sign of a rank; of the same counter, until `give` was called last."""
        if _key(self._round, rank) == _key(self._round, self._rank):
            return _part(self._counter, rank)
        return hear(self._store, self._round, rank)


def hear(store: Store, round: int, rank: int) -> int:
    """Changes with each sign of a rank."""
    return _part(store.add(_key(round, rank), 0), rank)


def turn_of(rank: int, period_s: float) -> tuple[int, float]:
    """Number of the present heartbeat period of a rank, and the seconds left of it."""
    later_s = rank // _RANKS_OF_A_COUNTER * _SPREAD % 1.0 * period_s
    number, since_s = divmod(time.monotonic() - later_s, period_s)
    return int(number), period_s - since_s


def _key(round: int, rank: int) -> str:
    return f'beat/{round}/{rank // _RANKS_OF_A_COUNTER}'


def _shift(rank: int) -> int:
    return rank % _RANKS_OF_A_COUNTER * _BITS


def _part(counter: int, rank: int) -> int:
    return counter >> _shift(rank) & _MOST
