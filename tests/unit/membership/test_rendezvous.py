# SPDX-License-Identifier: Apache-2.0
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import TCPStore

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.membership import attendance, patience, rendezvous
from moevement_ext.membership.rendezvous import (
    EpochBroken,
    FencedOut,
    Rendezvous,
    announce_failure,
    break_epoch,
    how_broken,
    launcher_store,
    present_epoch,
    why_broken,
)
from moevement_ext.membership.signs import Signs
from tests.unit.forks import Forked
from tests.unit.membership.lives import (
    DEADLINE_S,
    TIMEOUT,
    WORLD,
    assert_one_new_epoch,
    connect,
    die_waiting,
    lives_of,
    meet_all,
    report_of,
)
from tests.unit.membership.ranks import meets

pytestmark = pytest.mark.timed

SHORT = timedelta(seconds=1)
"""For what would take long otherwise; by then all that can come has come."""


@pytest.fixture
def launcher() -> TCPStore:
    """The store of the launcher, which outlives its workers."""
    return TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@pytest.fixture
def connections(launcher: TCPStore) -> list[TCPStore]:
    """One to the launcher's store for each rank; its lives, which never overlap, share it."""
    return [connect(launcher) for _ in range(WORLD)]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORLD) as threads:
        yield threads


# Meeting


def test_all_ranks_meet_in_one_store(connections: list[TCPStore]) -> None:
    assert assert_one_new_epoch(meet_all(lives_of(connections))) == 0


def test_everybody_has_what_each_rank_brought(connections: list[TCPStore]) -> None:
    brought = [b'', b'/', b'\xff\x00/\xfe', b'x' * 2**20]
    with ThreadPoolExecutor(WORLD) as threads:
        meetings = threads.map(
            lambda life: life.meet(lambda: brought[life.rank], TIMEOUT), lives_of(connections)
        )
        assert [meeting.reports for meeting in meetings] == [brought] * WORLD


def test_a_new_life_of_all_ranks_meets_elsewhere(connections: list[TCPStore]) -> None:
    assert assert_one_new_epoch(meet_all(lives_of(connections))) == 0
    assert assert_one_new_epoch(meet_all(lives_of(connections))) > 0


def test_second_life_of_one_rank_opens_a_new_epoch_and_everybody_follows(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    """Rank 1 is killed while it waits. All have come then, but not all are alive."""
    victim = Forked(meets, launcher.port, 1, WORLD)
    launcher.wait(['here/0/0'], TIMEOUT)
    victim.kill()
    one, *others = [lives_of(connections)[rank] for rank in (1, 0, 2, 3)]
    waiting = [threads.submit(life.meet, report_of(life.rank), TIMEOUT) for life in others]
    launcher.wait(['full/0'], TIMEOUT)
    last = one.meet(report_of(1), TIMEOUT)
    meetings = [last, *(future.result() for future in waiting)]
    assert assert_one_new_epoch(meetings) == 1
    assert last.reports == [report_of(rank)() for rank in range(WORLD)]
    assert why_broken(launcher, 0) == 'rank 1 was started again'


def test_a_report_is_asked_for_anew_in_each_epoch(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    lives, asked = lives_of(connections), iter([b'old', b'new'])
    first = threads.submit(lives[0].meet, lambda: next(asked), TIMEOUT)
    launcher.wait(['join/0/0'], TIMEOUT)
    break_epoch(launcher, 0, 'test')
    meetings = [*meet_all(lives[1:]), first.result()]
    assert_one_new_epoch(meetings)
    assert {meeting.reports[0] for meeting in meetings} == {b'new'}


def test_fifty_random_returns(launcher: TCPStore, connections: list[TCPStore]) -> None:
    """Any ranks die at any time before the others have come; nobody stays in their epoch."""
    chance = random.Random(7)
    for _ in range(50):
        epoch = present_epoch(launcher)
        for rank in chance.sample(range(WORLD), chance.randrange(WORLD + 1)):
            if launcher.check([f'join/{epoch}/{rank}']):
                break  # all of the last turn are there
            if chance.random() < 0.5:
                attendance.sign(launcher, f'here/{epoch}', rank, WORLD)  # as soon as it joined
            else:
                die_waiting(launcher, rank)
        assert_one_new_epoch(meet_all(chance.sample(lives_of(connections), WORLD)))


def test_several_return_at_the_same_moment(connections: list[TCPStore]) -> None:
    """Who is second to leave an epoch must not take it, full of the dead, for a complete one."""
    for _ in range(20):
        assert_one_new_epoch(meet_all(lives_of(connections)))


def test_timeout_names_the_missing_ranks(launcher: TCPStore) -> None:
    die_waiting(launcher, 2)
    expected = r'Ranks \[1, 3\] did not come in time.*--distributed-timeout-minutes'
    with pytest.raises(SparseCheckpointError, match=expected):
        Rendezvous(connect(launcher), 0, WORLD).meet(report_of(0), SHORT)


def test_who_is_late_and_heard_of_is_waited_for(
    launcher: TCPStore,
    connections: list[TCPStore],
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends a write, or so, and takes several times as long as one that is not heard of may."""
    monkeypatch.setattr(patience, '_BETWEEN_SIGNS_S', 0.5)
    lives = lives_of(connections)
    epoch = assert_one_new_epoch(meet_all(lives))
    looks = [threading.Event() for _ in range(3)]
    for life, looked in zip(lives[:3], looks, strict=True):
        monkeypatch.setattr(life, '_signs', partial(three_times, looked, life._signs, []))
    waiting = [
        threads.submit(life.meet, report_of(life.rank), timedelta(seconds=3), epoch)
        for life in lives[:3]
    ]
    signs = Signs(launcher, epoch, 3)
    while not all(looked.is_set() for looked in looks):
        signs.give()
        assert not any(future.done() for future in waiting)
        time.sleep(0.02)
    meetings = [lives[3].meet(report_of(3), TIMEOUT, epoch), *(one.result() for one in waiting)]
    assert assert_one_new_epoch(meetings) == epoch + 1


def three_times[T](done: threading.Event, look: Callable[[], T], looks: list[T]) -> T:
    """What `look` returns; `done` is set the third time."""
    looks.append(look())
    if len(looks) == 3:
        done.set()
    return looks[-1]


def test_who_is_late_and_not_heard_of_any_more_is_not(
    launcher: TCPStore, connections: list[TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, '_BETWEEN_SIGNS_S', 0.5)
    lives = lives_of(connections)
    epoch = assert_one_new_epoch(meet_all(lives))
    Signs(launcher, epoch, 3).give()
    with pytest.raises(SparseCheckpointError, match=r'Ranks \[1, 2, 3\] did not come in time'):
        lives[0].meet(report_of(0), SHORT, epoch)


def test_timeout_says_that_somebody_no_longer_answers(launcher: TCPStore) -> None:
    for rank in (1, 2, 3):
        die_waiting(launcher, rank)
    with pytest.raises(SparseCheckpointError, match='Ranks that had joined did not come in time'):
        Rendezvous(connect(launcher), 0, WORLD).meet(report_of(0), SHORT)


def test_fifty_epochs_leave_hardly_more_keys_than_three(
    launcher: TCPStore, connections: list[TCPStore]
) -> None:
    """Heartbeats, barriers and what ranks tell each other, too; what is not of an epoch stays."""
    launcher.set('job/0/plan', 'kept')
    launcher.set('evict/0', '1')
    lives = lives_of(connections)
    counts, epoch = [], None
    for _ in range(50):
        meetings = meet_all(lives, after=epoch)
        epoch = assert_one_new_epoch(meetings)
        with ThreadPoolExecutor(WORLD) as threads:
            list(
                threads.map(
                    lambda at: at[0].barrier(at[1], 'replayed', TIMEOUT),
                    zip(lives, meetings, strict=True),
                )
            )
        for rank in range(WORLD):
            Signs(launcher, epoch, rank).give()
            meetings[rank].store.set(f'address/{rank}', 'somewhere')
        forgetting = lives[0]._forgetting
        assert forgetting is not None
        forgetting.join(DEADLINE_S)
        counts.append(launcher.num_keys())
    # On a busy machine an epoch may be broken before all have come, and the next one meets.
    assert max(counts) < 2 * counts[2]
    assert launcher.check(['job/0/plan', 'evict/0'])


def test_nothing_is_deleted_while_ranks_recover(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    """The store has enough to do then, in a large job."""
    lives = lives_of(connections)
    epochs = [assert_one_new_epoch(meet_all(lives))]
    forgetting = lives[0]._forgetting
    for _ in range(2):
        meetings = meet_all(lives, after=epochs[-1])
        epochs.append(assert_one_new_epoch(meetings))
    assert lives[0]._forgetting is forgetting and launcher.check([f'join/{epochs[0]}/1'])
    list(
        threads.map(
            lambda at: at[0].barrier(at[1], 'replayed', TIMEOUT), zip(lives, meetings, strict=True)
        )
    )
    assert lives[0]._forgetting is not None
    lives[0]._forgetting.join(DEADLINE_S)
    assert not launcher.check([f'join/{epochs[0]}/1'])


def test_what_former_lives_of_the_job_left_is_deleted(
    launcher: TCPStore, connections: list[TCPStore]
) -> None:
    """Every life leaves what all its ranks have given each other."""
    life = secrets.token_hex(8)
    for origin in (0, 3, 12):
        launcher.set(f'job/{life}/{origin}/exchange/operators/0/0', 'a MiB')
    lives = lives_of(connections)
    meet_all(lives)
    forgetting = lives[0]._forgetting
    assert forgetting is not None
    forgetting.join(DEADLINE_S)
    left = [key for key in launcher.list_keys() if key.startswith('job/')]
    assert left == [f'job/{life}/12/exchange/operators/0/0']


def test_nothing_is_deleted_in_a_store_of_the_next_life(launcher: TCPStore) -> None:
    """The one that ranks met in was lost just then, and its numbers begin anew."""
    break_epoch(launcher, present_epoch(launcher), 'rank 1 was started again')
    die_waiting(launcher, 0)
    keys = set(launcher.list_keys())
    rendezvous._forget(launcher.clone, 7)
    assert keys <= set(launcher.list_keys())
    break_epoch(launcher, 1, 'test')
    rendezvous._forget(launcher.clone, 1)
    assert not launcher.check(['broken/0']) and launcher.check(['broken/1'])


# After a failure


def test_survivors_leave_an_epoch_together_with_the_new_process(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    lives = lives_of(connections)
    epoch = assert_one_new_epoch(meet_all(lives))
    break_epoch(launcher, epoch, 'worker of rank 2 died')
    survivors = [
        threads.submit(lives[rank].meet, report_of(rank), TIMEOUT, after=epoch)
        for rank in (0, 1, 3)
    ]
    newcomer = Rendezvous(connections[2], 2, WORLD)
    meetings = [newcomer.meet(report_of(2), TIMEOUT), *(one.result() for one in survivors)]
    assert assert_one_new_epoch(meetings) == epoch + 1
    assert why_broken(launcher, epoch) == 'worker of rank 2 died'
    assert why_broken(launcher, epoch + 1) is None


def test_who_leaves_first_ends_the_epoch(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    """A rank that has lost a peer, and nobody else has noticed."""
    lives = lives_of(connections)
    epoch = assert_one_new_epoch(meet_all(lives))
    first = threads.submit(lives[3].meet, report_of(3), TIMEOUT, after=epoch)
    launcher.wait([f'join/{epoch + 1}/3'], TIMEOUT)
    assert why_broken(launcher, epoch) == 'rank 3 left'
    meetings = [*meet_all(lives[:3], after=epoch), first.result()]
    assert assert_one_new_epoch(meetings) == epoch + 1


def test_survivors_meet_although_two_more_epochs_are_broken_meanwhile(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    lives = lives_of(connections)
    epoch = assert_one_new_epoch(meet_all(lives))
    early = [
        threads.submit(lives[rank].meet, report_of(rank), TIMEOUT, after=epoch) for rank in (0, 1)
    ]
    for broken in (epoch + 1, epoch + 2):
        launcher.wait([f'join/{broken}/0', f'join/{broken}/1'], TIMEOUT)
        break_epoch(launcher, broken, 'another failure')
    meetings = [*meet_all(lives[2:], after=epoch), *(one.result() for one in early)]
    assert assert_one_new_epoch(meetings) == epoch + 3


def test_a_process_that_was_replaced_is_fenced_out(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    """It was stopped, or cut off, while the others went on with another process in its place."""
    lives = lives_of(connections)
    epoch = assert_one_new_epoch(meet_all(lives))
    break_epoch(launcher, epoch, 'rank 1 has not been heard of')
    replacement = Rendezvous(connections[1], 1, WORLD)
    joined = threads.submit(replacement.meet, report_of(1), TIMEOUT)
    launcher.wait([f'join/{epoch + 1}/1'], TIMEOUT)
    late = Rendezvous(connect(launcher), 1, WORLD)
    with pytest.raises(FencedOut, match='rank 1 was replaced'):
        late.meet(report_of(1), TIMEOUT, after=epoch)
    meetings = [*meet_all([lives[0], *lives[2:]], after=epoch), joined.result()]
    assert assert_one_new_epoch(meetings) == epoch + 1, 'the others were not disturbed'


def test_of_two_processes_of_a_rank_that_join_at_once_only_one_is_in_the_epoch(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    """And what the other brings is seen by nobody. Neither has found a predecessor."""
    lives = lives_of(connections)
    first = threads.submit(lives[1].meet, lambda: b'first', TIMEOUT)
    launcher.wait(['join/0/1'], TIMEOUT)
    assert not Rendezvous(connect(launcher), 1, WORLD)._join(0, b'second', False)
    others = [threads.submit(lives[rank].meet, report_of(rank), TIMEOUT) for rank in (0, 2, 3)]
    meetings = [first.result(), *(other.result() for other in others)]
    assert assert_one_new_epoch(meetings) == 0
    assert {meeting.reports[1] for meeting in meetings} == {b'first'}


def test_a_new_process_ends_the_epoch_of_its_predecessor(
    launcher: TCPStore, connections: list[TCPStore]
) -> None:
    lives = lives_of(connections)
    epoch = assert_one_new_epoch(meet_all(lives))
    assert not lives[2].predecessor_took_part(), 'that is itself'
    assert present_epoch(launcher) == epoch
    assert Rendezvous(connections[2], 2, WORLD).predecessor_took_part()
    assert why_broken(launcher, epoch) == 'rank 2 was started again'
    assert present_epoch(launcher) == epoch + 1
    assert not Rendezvous(connections[2], 2, WORLD).predecessor_took_part()


def test_the_launcher_ends_only_an_epoch_in_which_its_worker_was(launcher: TCPStore) -> None:
    announce_failure(launcher, 1, 'killed by signal 9')
    assert (present_epoch(launcher), why_broken(launcher, 0)) == (0, None)
    die_waiting(launcher, 1)
    announce_failure(launcher, 1, 'killed by signal 9')
    assert (present_epoch(launcher), why_broken(launcher, 0)) == (1, 'killed by signal 9')
    announce_failure(launcher, 1, 'killed by signal 9')
    assert present_epoch(launcher) == 1, 'the others have moved on without it'


def test_an_epoch_is_broken_once_by_whoever_asks_first(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    together = threading.Barrier(WORLD)

    def ask(rank: int) -> None:
        epoch = present_epoch(connections[rank])
        together.wait()
        break_epoch(connections[rank], epoch, f'rank {rank}')

    for epoch in range(20):
        list(threads.map(ask, range(WORLD)))
        first = why_broken(launcher, epoch)
        break_epoch(launcher, epoch, 'late')
        assert why_broken(launcher, epoch) == first != 'late'
        assert present_epoch(launcher) == epoch + 1


def test_when_an_epoch_ended_is_known_to_who_comes_later(launcher: TCPStore) -> None:
    assert how_broken(launcher, 0) is None
    before = time.time()
    break_epoch(launcher, 0, 'rank 1 of a b died')
    after = time.time()
    break_epoch(launcher, 0, 'late')
    found = how_broken(launcher, 0)
    assert found is not None and before - 1e-3 <= found.since <= after + 1e-3
    assert found.reason == why_broken(launcher, 0) == 'rank 1 of a b died'


def test_an_epoch_without_a_reason_is_broken_too(launcher: TCPStore) -> None:
    break_epoch(launcher, 0, '')
    assert why_broken(launcher, 0) == 'unknown'


# Barrier


def test_nobody_passes_a_barrier_before_all_have_come(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    lives = lives_of(connections)
    meetings = meet_all(lives)
    for name in ('ready', 'replayed'):
        passing = [
            threads.submit(lives[rank].barrier, meetings[rank], name, TIMEOUT) for rank in range(3)
        ]
        wait_for_arrivals(launcher, name, 3)
        assert not any(future.done() for future in passing)
        lives[3].barrier(meetings[3], name, TIMEOUT)
        assert [future.result() for future in passing] == [None] * 3


def wait_for_arrivals(launcher: TCPStore, name: str, count: int) -> None:
    """Poll until as many ranks of epoch 0 are in the barrier."""
    while launcher.add(f'epoch/0/barrier/{name}', 0) < count:
        pass


def test_a_failure_ends_the_waiting_at_a_barrier(
    launcher: TCPStore, connections: list[TCPStore], threads: ThreadPoolExecutor
) -> None:
    lives = lives_of(connections)
    meetings = meet_all(lives)
    waiting: list[Future[None]] = [
        threads.submit(lives[rank].barrier, meetings[rank], 'ready', TIMEOUT) for rank in range(3)
    ]
    wait_for_arrivals(launcher, 'ready', 3)
    break_epoch(launcher, meetings[0].epoch, 'rank 3 is gone')
    for future in waiting:
        with pytest.raises(EpochBroken, match='rank 3 is gone'):
            future.result()


def test_a_barrier_does_not_wait_for_ever(connections: list[TCPStore]) -> None:
    lives = lives_of(connections)
    meetings = meet_all(lives)
    with pytest.raises(SparseCheckpointError, match='did not come in time'):
        lives[0].barrier(meetings[0], 'ready', SHORT)


# The launcher


def test_store_of_the_launcher(launcher: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('TORCHELASTIC_USE_AGENT_STORE', raising=False)
    assert launcher_store(TIMEOUT) is None
    monkeypatch.setenv('TORCHELASTIC_USE_AGENT_STORE', 'True')
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    monkeypatch.setenv('MASTER_PORT', str(launcher.port))
    launcher.set('from', 'launcher')
    store = launcher_store(TIMEOUT)
    assert store is not None
    assert store.get('from') == b'launcher'


def test_an_epoch_whose_breaker_died_half_way_is_left() -> None:
    """Nobody watches while ranks meet; the reason is there, the next number is not."""
    t = timedelta(seconds=3)
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=t)
    assert present_epoch(store) == 0
    store.compare_set('broken/0', '', 'the launcher of rank 1 was killed')
    with pytest.raises(SparseCheckpointError, match='did not come in time'):
        Rendezvous(store, 0, 4).meet(lambda: b'same', SHORT)
    assert present_epoch(store) == 1 and store.check(['join/1/0'])
