# SPDX-License-Identifier: Apache-2.0
"""Ranks that neither arrive nor send heartbeats are evicted; late ranks with heartbeats are not."""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from moevement_ext.membership import counters, exchange, rendezvous_runner
from moevement_ext.membership.counters import Absent, Deadline, Heartbeats, open_barrier
from moevement_ext.membership.rendezvous import (
    Rendezvous,
    absent,
    end_round,
    holding_up,
    present_round,
)
from moevement_ext.membership.rendezvous_runner import MissingRanks
from moevement_ext.membership.report import Report, encode
from tests.support.way import Way
from tests.unit.membership.clock import Clock

pytestmark = pytest.mark.timed

HANG_S = 3.0
"""More than a pause of this process counts for."""
DUE_S = 20.0
"""Timeout of an event that is due at once."""
TIMEOUT = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def fast_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_runner, 'HEARTBEAT_S', 0.02)


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Four ranks have met; the process number of rank n was 100 + n."""
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    for rank in range(4):
        assert Rendezvous(store, rank, 4)._join(0, report_of(100 + rank), False)
    open_barrier(store, 'met/0')
    end_round(store, present_round(store), 'rank 3 died')
    yield store


def report_of(process: int, launch: str = '') -> bytes:
    return encode(Report(survivor=False, node='a', process=process, windows=[], launch=launch))


def test_only_absent_ranks_without_heartbeats_are_evicted(store: TCPStore) -> None:
    """Rank 0 has arrived, rank 1 is late, ranks 2 and 3 send no heartbeats."""
    assert Rendezvous(store, 0, 4)._join(1, b'', False)
    began, heartbeats = time.monotonic(), Heartbeats(store, 0, 1)
    found = MissingRanks(store.clone, 4, HANG_S, lambda: True)
    while not store.check(['evict/2', 'evict/3']):
        assert time.monotonic() - began < TIMEOUT.total_seconds()
        heartbeats.send()
        time.sleep(0.01)
    assert time.monotonic() - began > HANG_S
    assert (store.get('evict/2'), store.get('evict/3')) == (b'102', b'103')
    assert not store.check(['evict/0']) and not store.check(['evict/1'])
    found.close()


def test_rank_that_stops_while_joining_is_evicted(store: TCPStore) -> None:
    """Rank 2 is a survivor, rank 3 is new; both have signed their arrival, without a report."""
    for rank in (0, 1):
        assert Rendezvous(store, rank, 4)._join(1, report_of(200 + rank), False)
        counters.sign(store, 'answered/1', rank, 4)
    store.set('coming/1/3', exchange.packed(report_of(203)))
    for rank in (2, 3):
        counters.sign(store, 'here/1', rank, 4)
    open_barrier(store, 'full/1')
    found = MissingRanks(store.clone, 4, HANG_S, lambda: True)
    store.wait(['evict/2', 'evict/3'], TIMEOUT)
    assert (store.get('evict/2'), store.get('evict/3')) == (b'102', b'203')
    assert not store.check(['evict/0']) and not store.check(['evict/1'])
    found.close()


def test_search_for_absent_ranks_reconnects(store: TCPStore) -> None:
    """The eviction request is repeated, in case the launcher has not received it."""
    way, connected = Way(store.port), threading.Semaphore(0)

    def connect() -> TCPStore:
        made = TCPStore('127.0.0.1', way.port, is_master=False, timeout=TIMEOUT)
        connected.release()
        return made

    found = MissingRanks(connect, 4, HANG_S, lambda: True)
    for _ in range(2):
        assert connected.acquire(timeout=TIMEOUT.total_seconds())
        way.cut()
    store.wait(['evict/3'], TIMEOUT)
    store.delete_key('evict/3')
    store.wait(['evict/3'], TIMEOUT)
    found.close()
    way.close()


def test_time_of_a_pause_of_the_searching_rank_does_not_count(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is late, and was stopped for as long as the searching rank."""
    clock = Clock()
    monkeypatch.setattr(rendezvous_runner, 'time', clock)
    looks = 0

    def is_ours() -> bool:
        nonlocal looks
        looks += 1
        return True

    def pass_by(seconds: float) -> None:
        clock.now += seconds
        seen = looks
        while looks < seen + 3:  # the current check may have read the clock before
            time.sleep(0.001)

    assert Rendezvous(store, 0, 2)._join(1, b'', False)
    found = MissingRanks(store.clone, 2, 4.0, is_ours)
    heartbeats = Heartbeats(store, 0, 1)
    for _ in range(3):
        heartbeats.send()
        pass_by(1.0)
        pass_by(1000.0)  # counts for two seconds
    assert not store.check(['evict/1'])
    pass_by(1000.0)
    pass_by(1000.0)
    assert store.check(['evict/1'])
    found.close()


def joined(store: TCPStore, ranks: Collection[int]) -> list[Rendezvous]:
    """Ranks of the present round; the process id of rank n is 200 + n."""
    made = [Rendezvous(store.clone(), rank, len(ranks)) for rank in ranks]
    for one in made:
        assert one._join(1, report_of(200 + one.rank), False)
    return made


def answer(members: Sequence[Rendezvous]) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=one._wait_for_all, args=(1, Deadline(TIMEOUT)), daemon=True)
        for one in members
    ]
    for thread in threads:
        thread.start()
    return threads


def wait_for(store: TCPStore, rank: int) -> None:
    """Wait until this rank is the only one that has not answered."""
    while [one.rank for one in holding_up(store, 3)] != [rank]:
        time.sleep(0.01)


def test_rank_that_stops_while_packing_reports_is_evicted(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, go_on = threading.Event(), threading.Event()
    gather = exchange.gather

    def stop(*args: Any) -> list[bytes]:
        stopped.set()
        go_on.wait()
        return gather(*args)

    monkeypatch.setattr(exchange, 'gather', stop)
    first, second, third = joined(store, range(3))
    waiting = answer([first, second])
    wait_for(store, 2)
    found = MissingRanks(store.clone, 3, HANG_S, lambda: True)
    waiting += answer([third])
    assert stopped.wait(TIMEOUT.total_seconds())
    store.wait(['evictions'], TIMEOUT)
    (packs,) = holding_up(store, 3)
    assert store.get(f'evict/{packs.rank}') == str(200 + packs.rank).encode()
    go_on.set()
    for thread in waiting:
        thread.join()
    found.close()


def test_round_ends_if_a_rank_stops_before_it_says_that_it_packs(store: TCPStore) -> None:
    """No rank knows which one answered last; the next round shows which one has stopped."""
    joined(store, range(3))
    for rank in range(3):
        counters.sign(store, 'answered/1', rank, 3)
    found = MissingRanks(store.clone, 3, HANG_S, lambda: True)
    store.wait(['broken/1'], timedelta(seconds=DUE_S))
    assert not store.check(['evictions'])
    found.close()


def test_absent_ranks_are_those_of_the_last_complete_round(store: TCPStore) -> None:
    """Rounds that were broken before all ranks had met are skipped."""
    assert absent(store, 4) == [Absent(0, rank) for rank in range(4)]
    joined(store, range(4))
    assert absent(store, 4) == []
    for round in (1, 2):
        end_round(store, round, 'rank 1 died')
    assert absent(store, 4) == [Absent(0, rank) for rank in range(4)]
    open_barrier(store, 'met/3')
    end_round(store, 3, 'rank 1 died')
    assert absent(store, 4) == [Absent(3, rank) for rank in range(4)]
