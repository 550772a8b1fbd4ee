# SPDX-License-Identifier: Apache-2.0
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import TCPStore

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.membership import counters, rendezvous
from moevement_ext.membership.counters import send_heartbeat
from moevement_ext.membership.rendezvous import (
    FencedOut,
    Rendezvous,
    RendezvousResult,
    announce_failure,
    end_round,
    how_broken,
    present_round,
)

pytestmark = pytest.mark.timed

WORLD = 4
DEADLINE_S = 60.0
"""Timeout of an event that is due at once."""
TIMEOUT = timedelta(seconds=DEADLINE_S)

SHORT = timedelta(seconds=1)
"""Timeout of waits that are expected to fail."""


def connect(launcher: TCPStore) -> TCPStore:
    return TCPStore('127.0.0.1', launcher.port, is_master=False, timeout=TIMEOUT)


def attempts_of(connections: Sequence[TCPStore]) -> list[Rendezvous]:
    return [Rendezvous(store, rank, WORLD) for rank, store in enumerate(connections)]


def report_of(rank: int) -> Callable[[], bytes]:
    return lambda: b'report of %d' % rank


def meet_all(attempts: Sequence[Rendezvous], after: int | None = None) -> list[RendezvousResult]:
    """Start all at the same moment; return the result of each."""
    together = threading.Barrier(len(attempts))

    def attempt(one: Rendezvous) -> RendezvousResult:
        together.wait()
        return one.meet(report_of(one.rank), TIMEOUT, after)

    with ThreadPoolExecutor(len(attempts)) as threads:
        return list(threads.map(attempt, attempts))


def assert_one_new_round(results: Sequence[RendezvousResult]) -> int:
    """All are in the same round, whose store has no key of an earlier round."""
    [round] = {result.round for result in results}
    stores = [result.store for result in results]
    assert not stores[0].check(['mark'])
    stores[0].set('mark', str(round))
    assert {store.get('mark') for store in stores} == {b'%d' % round}
    return round


def die_waiting(launcher: TCPStore, rank: int) -> None:
    """Leave the keys of a worker that was killed while it waited for the others."""
    assert Rendezvous(launcher, rank, WORLD)._join(present_round(launcher), b'dead', False)


@pytest.fixture
def launcher() -> TCPStore:
    """The store of the launcher, which outlives its workers."""
    return TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@pytest.fixture
def connections(launcher: TCPStore) -> list[TCPStore]:
    """One connection per rank; its attempts, which never overlap, share it."""
    return [connect(launcher) for _ in range(WORLD)]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORLD) as threads:
        yield threads


# RendezvousResult


def test_every_rank_receives_all_reports(connections: list[TCPStore]) -> None:
    brought = [b'', b'/', b'\xff\x00/\xfe', b'x' * 2**20]
    with ThreadPoolExecutor(WORLD) as threads:
        results = threads.map(
            lambda attempt: attempt.meet(lambda: brought[attempt.rank], TIMEOUT),
            attempts_of(connections),
        )
        assert [result.reports for result in results] == [brought] * WORLD


def test_ranks_meet_after_deaths_at_random_moments(
    launcher: TCPStore, connections: list[TCPStore]
) -> None:
    """Any ranks die before the others have arrived; none stays in their round."""
    chance = random.Random(7)
    for _ in range(50):
        round = present_round(launcher)
        for rank in chance.sample(range(WORLD), chance.randrange(WORLD + 1)):
            if launcher.check([f'join/{round}/{rank}']):
                break  # all ranks of the last turn have joined
            if chance.random() < 0.5:  # it died as soon as it had its place
                launcher.set(counters.place_in(round, rank), 'dead')
            else:
                die_waiting(launcher, rank)
        assert_one_new_round(meet_all(chance.sample(attempts_of(connections), WORLD)))


def test_timeout_names_the_missing_ranks(launcher: TCPStore) -> None:
    die_waiting(launcher, 2)
    expected = r'Ranks \[1, 3\] did not respond in time.*--distributed-timeout-minutes'
    with pytest.raises(SparseCheckpointError, match=expected):
        Rendezvous(connect(launcher), 0, WORLD).meet(report_of(0), SHORT)


def test_late_rank_with_heartbeats_is_waited_for(
    launcher: TCPStore,
    connections: list[TCPStore],
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters, '_BETWEEN_HEARTBEATS_S', 0.5)
    attempts = attempts_of(connections)
    round = assert_one_new_round(meet_all(attempts))
    looks = [threading.Event() for _ in range(3)]
    for attempt, looked in zip(attempts[:3], looks, strict=True):
        monkeypatch.setattr(
            attempt, '_heartbeats', partial(three_times, looked, attempt._heartbeats, [])
        )
    waiting = [
        threads.submit(attempt.meet, report_of(attempt.rank), timedelta(seconds=3), round)
        for attempt in attempts[:3]
    ]
    while not all(looked.is_set() for looked in looks):
        send_heartbeat(launcher, 3)
        assert not any(future.done() for future in waiting)
        time.sleep(0.02)
    results = [attempts[3].meet(report_of(3), TIMEOUT, round), *(one.result() for one in waiting)]
    assert assert_one_new_round(results) == round + 1


def three_times[T](done: threading.Event, look: Callable[[], T], looks: list[T]) -> T:
    """Return the result of `look`; set `done` at the third call."""
    looks.append(look())
    if len(looks) == 3:
        done.set()
    return looks[-1]


def test_keys_do_not_grow_with_the_number_of_rounds(
    launcher: TCPStore, connections: list[TCPStore]
) -> None:
    launcher.set('job/0/plan', 'kept')
    launcher.set('memory', '/run')
    attempts = attempts_of(connections)
    counts, round = [], None
    for _ in range(50):
        results = meet_all(attempts, after=round)
        round = assert_one_new_round(results)
        with ThreadPoolExecutor(WORLD) as threads:
            list(
                threads.map(
                    lambda at: at[0].barrier(at[1], 'replayed', TIMEOUT),
                    zip(attempts, results, strict=True),
                )
            )
        for rank in range(WORLD):
            send_heartbeat(launcher, rank)
            results[rank].store.set(f'address/{rank}', 'somewhere')
        forgetting = attempts[0]._forgetting
        assert forgetting is not None
        forgetting.join(DEADLINE_S)
        counts.append(launcher.num_keys())
    # On a busy machine a round may be broken before all have arrived, and the next one completes.
    assert max(counts) < 2 * counts[2]
    assert launcher.check(['job/0/plan', 'memory'])


def test_keys_of_former_attempts_of_the_job_are_deleted(
    launcher: TCPStore, connections: list[TCPStore]
) -> None:
    """Every attempt leaves the values that its ranks have exchanged."""
    attempt = secrets.token_hex(8)
    for origin in (0, 3, 12):
        launcher.set(f'job/{attempt}/{origin}/exchange/operators/0/0', 'a MiB')
    attempts = attempts_of(connections)
    meet_all(attempts)
    forgetting = attempts[0]._forgetting
    assert forgetting is not None
    forgetting.join(DEADLINE_S)
    left = [key for key in launcher.list_keys() if key.startswith('job/')]
    assert left == [f'job/{attempt}/12/exchange/operators/0/0']


def test_no_keys_are_deleted_in_the_store_of_the_next_attempt(launcher: TCPStore) -> None:
    """The store of the ranks has just been lost; round numbers of its successor start at 0."""
    end_round(launcher, present_round(launcher), 'rank 1 was started again')
    die_waiting(launcher, 0)
    keys = set(launcher.list_keys())
    rendezvous._forget(launcher.clone, 7)
    assert keys <= set(launcher.list_keys())
    end_round(launcher, 1, 'test')
    rendezvous._forget(launcher.clone, 1)
    assert not launcher.check(['broken/0']) and launcher.check(['broken/1'])


# After a failure


def test_replaced_process_is_fenced_out(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    """It was stopped or cut off, and the others continued with its replacement."""
    attempts = attempts_of(connections)
    round = assert_one_new_round(meet_all(attempts))
    end_round(launcher, round, 'rank 1 is lost')
    replacement = Rendezvous(connections[1], 1, WORLD)
    joined = threads.submit(replacement.meet, report_of(1), TIMEOUT)
    launcher.wait([f'join/{round + 1}/1'], TIMEOUT)
    late = Rendezvous(connect(launcher), 1, WORLD)
    with pytest.raises(FencedOut, match='rank 1 was replaced'):
        late.meet(report_of(1), TIMEOUT, after=round)
    results = [*meet_all([attempts[0], *attempts[2:]], after=round), joined.result()]
    assert assert_one_new_round(results) == round + 1, 'the others were not disturbed'
    end_round(launcher, round + 1, 'rank 3 died')
    with pytest.raises(FencedOut, match='rank 1 was replaced'):
        attempts[1].meet(report_of(1), TIMEOUT, after=round)  # it has slept through that round
    for failed in (round + 2, round + 3):
        end_round(launcher, failed, 'a rank died before the others had come')
    with pytest.raises(FencedOut, match='rank 1 was replaced'):
        attempts[1].meet(report_of(1), TIMEOUT, after=round)
    assert not counters.has_signed(launcher, f'here/{round + 4}', 1)


def test_one_of_two_processes_of_a_rank_joins_a_round(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    """The report of the other one is never seen. Neither has found a predecessor."""
    attempts = attempts_of(connections)
    first = threads.submit(attempts[1].meet, lambda: b'first', TIMEOUT)
    launcher.wait(['join/0/1'], TIMEOUT)
    assert not Rendezvous(connect(launcher), 1, WORLD)._join(0, b'second', False)
    others = [threads.submit(attempts[rank].meet, report_of(rank), TIMEOUT) for rank in (0, 2, 3)]
    results = [first.result(), *(other.result() for other in others)]
    assert assert_one_new_round(results) == 0
    assert {result.reports[1] for result in results} == {b'first'}


def test_new_process_ends_the_round_of_its_predecessor(
    launcher: TCPStore, connections: list[TCPStore]
) -> None:
    attempts = attempts_of(connections)
    round = assert_one_new_round(meet_all(attempts))
    assert not attempts[2].predecessor_took_part(), 'that is itself'
    assert present_round(launcher) == round
    assert Rendezvous(connections[2], 2, WORLD).predecessor_took_part()
    assert how_broken(launcher, round).reason == 'rank 2 was started again'
    assert present_round(launcher) == round + 1
    assert not Rendezvous(connections[2], 2, WORLD).predecessor_took_part()


def test_launcher_ends_only_rounds_of_its_worker(launcher: TCPStore) -> None:
    announce_failure(launcher, 1, 'killed by signal 9')
    assert (present_round(launcher), how_broken(launcher, 0).reason) == (0, 'unknown')
    die_waiting(launcher, 1)
    announce_failure(launcher, 1, 'killed by signal 9')
    assert (present_round(launcher), how_broken(launcher, 0).reason) == (1, 'killed by signal 9')
    announce_failure(launcher, 1, 'killed by signal 9')
    assert present_round(launcher) == 1, 'the others have moved on without it'


# Barrier


def test_barrier_holds_until_all_ranks_have_arrived(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    attempts = attempts_of(connections)
    results = meet_all(attempts)
    for name in ('ready', 'replayed'):
        passing = [
            threads.submit(attempts[rank].barrier, results[rank], name, TIMEOUT)
            for rank in range(3)
        ]
        wait_for_arrivals(launcher, name, 3)
        assert not any(future.done() for future in passing)
        attempts[3].barrier(results[3], name, TIMEOUT)
        assert [future.result() for future in passing] == [None] * 3


def wait_for_arrivals(launcher: TCPStore, name: str, count: int) -> None:
    """Poll until this many ranks of round 0 are in the barrier."""
    while launcher.add(f'round/0/barrier/{name}', 0) < count:
        pass


def test_wait_at_a_barrier_is_bounded(connections: list[TCPStore]) -> None:
    attempts = attempts_of(connections)
    results = meet_all(attempts)
    with pytest.raises(SparseCheckpointError, match='did not respond in time'):
        attempts[0].barrier(results[0], 'ready', SHORT)


# The launcher


def test_round_whose_breaker_died_halfway_is_left() -> None:
    """No watch runs during a rendezvous; the reason is set, but not the next round number."""
    t = timedelta(seconds=3)
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=t)
    assert present_round(store) == 0
    store.compare_set('broken/0', '', 'the launcher of rank 1 was killed')
    with pytest.raises(SparseCheckpointError, match='did not respond in time'):
        Rendezvous(store, 0, 4).meet(lambda: b'same', SHORT)
    assert present_round(store) == 1 and store.check(['join/1/0'])
