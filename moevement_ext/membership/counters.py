# SPDX-License-Identifier: Apache-2.0
"""Arrivals, heartbeats and barriers in the store; several ranks share a counter of arrivals.

Sixteen ranks share a counter of arrivals, with one bit each. The rank that completes one also
counts the completed counters, so the arrival of all ranks costs one request per rank, and a search
for missing ranks one per counter.

A rank that waits at a barrier sends no requests. The last rank to arrive opens the barrier, or the
process that ends the round closes it. Whichever comes first is final: no rank passes a barrier that
another rank has found closed. A store wakes up only the ranks that wait for a key of a given name,
so a round's barriers have fixed names.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

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


class Deadline:
    """Ends after a `timeout` in which some missing rank sent no heartbeat. Used by one thread.

    `heartbeats` returns the heartbeat counts of the missing ranks, or nothing if they are unknown;
    it is called once the timeout has passed. The caller checks again at `until` (by
    `time.monotonic`).
    """

    def __init__(
        self, timeout: timedelta, heartbeats: Callable[[], Mapping[int, int]] = dict
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        self._heartbeats = heartbeats
        self._counts: Mapping[int, int] | None = None
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


def _all_rose(before: Mapping[int, int], now: Mapping[int, int]) -> bool:
    return bool(now) and all(count != before.get(rank) for rank, count in now.items())


_RANKS_OF_A_COUNTER = 16


def sign(store: Store, name: str, rank: int, world_size: int) -> bool:
    """Record, once, that `rank` has arrived at `name`; True if it is the last of all ranks."""
    place = rank // _RANKS_OF_A_COUNTER
    counter = store.add(_counter(name, place), _bit(rank))
    is_full = counter.bit_count() == len(_ranks(place, world_size))
    return is_full and store.add(f'{name}/full', 1) == _counters(world_size)


def place_in(round_id: int, rank: int) -> str:
    """Key of a rank's report in a round; the process that sets it has the place of the rank."""
    return f'join/{round_id}/{rank}'


def has_signed(store: Store, name: str, rank: int) -> bool:
    return bool(int(peek(store, _counter(name, rank // _RANKS_OF_A_COUNTER)) or 0) & _bit(rank))


def missing(store: Store, name: str, world_size: int) -> list[int]:
    """Ranks that have not arrived, in ascending order."""
    found = []
    for place in range(_counters(world_size)):
        counter = int(peek(store, _counter(name, place)) or 0)
        found += [one for one in _ranks(place, world_size) if not counter & _bit(one)]
    return found


def _ranks(place: int, world_size: int) -> range:
    first = place * _RANKS_OF_A_COUNTER
    return range(first, min(first + _RANKS_OF_A_COUNTER, world_size))


def _counters(world_size: int) -> int:
    return -(-world_size // _RANKS_OF_A_COUNTER)


def _bit(rank: int) -> int:
    return 1 << rank % _RANKS_OF_A_COUNTER


def _counter(name: str, place: int) -> str:
    return f'{name}/{place}'


LONGEST_PERIOD_S = 5.0
"""Between two heartbeats of a rank."""
_PAUSE_S = 0.2


def send_heartbeat(store: Store, rank: int) -> None:
    store.add(_heartbeats(rank), 1)


def count_heartbeats(store: Store, ranks: Iterable[int]) -> dict[int, int]:
    """Values that change with each heartbeat, by rank; 0: a rank has never sent one."""
    return {rank: store.add(_heartbeats(rank), 0) for rank in ranks}


def lives(store: Store) -> bool:
    """True if rank 0 sends a heartbeat; waits for it."""
    before, until = count_heartbeats(store, [0]), time.monotonic() + 2 * LONGEST_PERIOD_S
    while (now := count_heartbeats(store, [0])) == before and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    return now != before


def _heartbeats(rank: int) -> str:
    return f'beat/{rank}'
