# SPDX-License-Identifier: Apache-2.0
"""Arrivals, heartbeats and barriers in the store; several ranks share a counter.

Sixteen ranks share a counter of arrivals. The rank that completes one also counts the completed
counters, so the arrival of all ranks costs one request per rank, and a search for missing ranks one
per counter. Several processes may claim the same rank; its bits show which process was the first.

Eight ranks share a counter of heartbeats. The request that sends a heartbeat also returns those of
the other ranks of the counter. All ranks of a counter send at the same times, by the clock of their
node, and ranks of other counters at other times.

A rank that waits at a barrier sends no requests. The last rank to arrive opens the barrier, or the
process that ends the round closes it. Whichever comes first is final: no rank passes a barrier that
another rank has found closed. A store wakes up only the ranks that wait for a key of a given name,
so a round's barriers have fixed names.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError, Store

from moevement_ext.store_answers import peek

_OPEN, _SHUT = 'open', 'shut'
# The process that should close the barrier may have died, so a wait is not unlimited. Torch logs a
# warning after each wait.
_LONGEST_WAIT_S = 60.0
_SHORTEST_WAIT_S = 0.01


def open_barrier(store: Store, barrier: str) -> None:
    """Let all ranks pass, unless the barrier is shut."""
    store.compare_set(barrier, '', _OPEN)


def close_barrier(store: Store, barrier: str) -> None:
    """Let no rank pass, unless the barrier is already open."""
    store.compare_set(barrier, '', _SHUT)


def has_moved(store: Store, barrier: str, deadline: float) -> bool:
    """Wait until a barrier is opened or shut; False if neither happens in time.

    No other thread can use this connection meanwhile. The wait ends at `deadline` (by
    `time.monotonic`), or after a minute.
    """
    left_s = min(max(deadline - time.monotonic(), _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
    try:
        store.wait([barrier], timedelta(seconds=left_s))
    except DistStoreError:
        return False
    return True


def is_open(found: bytes | None) -> bool:
    """True if `found` is the value of an open barrier; None: its round's keys are deleted."""
    return found == _OPEN.encode()


# Several heartbeats.
_BETWEEN_HEARTBEATS_S = 30.0


class Absent(NamedTuple):
    """A rank that other ranks wait for, and the last round in which its process took part."""

    round: int
    rank: int


class Deadline:
    """Ends after a `timeout` in which some missing rank sent no heartbeat. Used by one thread.

    `heartbeats` returns the heartbeat counts of the missing ranks, or nothing if they are unknown;
    it is called once the timeout has passed. The caller checks again at `until` (by
    `time.monotonic`).
    """

    def __init__(
        self, timeout: timedelta, heartbeats: Callable[[], Mapping[Absent, int]] = dict
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        self._heartbeats = heartbeats
        self._counts: Mapping[Absent, int] | None = None
        self._ends = self.until = time.monotonic() + self._timeout_s

    def is_over(self) -> bool:
        """True once the wait must end."""
        now = time.monotonic()
        if now < self.until:
            return False
        before, self._counts = self._counts, self._heartbeats()
        if before is None and self._counts:  # the next counts show whether they still rise
            self._ends = now + _BETWEEN_HEARTBEATS_S
        elif before is not None and _all_rose(before, self._counts):
            self._ends = now + self._timeout_s
        self.until = min(now + _BETWEEN_HEARTBEATS_S, self._ends)
        return now >= self._ends


def _all_rose(before: Mapping[Absent, int], now: Mapping[Absent, int]) -> bool:
    return bool(now) and all(count != before.get(one) for one, count in now.items())


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


def place_in(round_id: int, rank: int) -> str:
    """Key of a rank's report in a round."""
    return f'join/{round_id}/{rank}'


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


_SENDERS_OF_A_COUNTER = 8
# Bits of one rank; all ranks of a counter use fewer than 63, so that it is never negative.
_BEAT_BITS = 7
_MOST_BEATS = (1 << _BEAT_BITS) - 1
# Fraction of a period between one counter and the next; the golden ratio keeps them all apart.
_APART = 0.618
# Twice the longest period between two heartbeats.
_SURELY_HEARD_S = 10.0
_PAUSE_S = 0.2


class Heartbeats:
    """The heartbeats of a rank in a round. Used by one thread."""

    def __init__(self, store: Store, round_id: int, rank: int) -> None:
        self._store = store
        self._round = round_id
        self._rank = rank
        self._counter = store.add(_beat_key(round_id, rank), 0)

    def send(self) -> None:
        # The rank's bits wrap around. If a launcher has sent some of its heartbeats meanwhile, they
        # may carry over, which only counts as one more heartbeat of another rank.
        step = 1 if _beats(self._counter, self._rank) < _MOST_BEATS else -_MOST_BEATS
        added = step << _beat_shift(self._rank)
        self._counter = self._store.add(_beat_key(self._round, self._rank), added)

    def read(self, rank: int) -> int:
        """A value that changes with each heartbeat of a rank.

        Costs no request for ranks of the same counter, whose value is that of the last `send`.
        """
        if _beat_key(self._round, rank) == _beat_key(self._round, self._rank):
            return _beats(self._counter, rank)
        return read_heartbeats(self._store, self._round, rank)


def read_heartbeats(store: Store, round_id: int, rank: int) -> int:
    """A value that changes with each heartbeat of a rank."""
    return _beats(store.add(_beat_key(round_id, rank), 0), rank)


def lives(store: Store, round_id: int) -> bool:
    """True if one of the first ranks sends a heartbeat in the round; waits for it."""
    before, until = store.add(_beat_key(round_id, 0), 0), time.monotonic() + _SURELY_HEARD_S
    while (now := store.add(_beat_key(round_id, 0), 0)) == before and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    return now != before


def turn_of(rank: int, period_s: float) -> tuple[int, float]:
    """Number of a rank's present heartbeat period, and its remaining seconds."""
    later_s = rank // _SENDERS_OF_A_COUNTER * _APART % 1.0 * period_s
    number, since_s = divmod(time.monotonic() - later_s, period_s)
    return int(number), period_s - since_s


def _beat_key(round_id: int, rank: int) -> str:
    return f'beat/{round_id}/{rank // _SENDERS_OF_A_COUNTER}'


def _beat_shift(rank: int) -> int:
    return rank % _SENDERS_OF_A_COUNTER * _BEAT_BITS


def _beats(counter: int, rank: int) -> int:
    return counter >> _beat_shift(rank) & _MOST_BEATS
