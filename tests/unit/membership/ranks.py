# SPDX-License-Identifier: Apache-2.0
"""Rank programs that tests run in separate processes."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from moevement_ext.membership import membership, round_watch, standstill, training_thread
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import Rendezvous, end_round
from moevement_ext.membership.report import Report
from moevement_ext.membership.training_thread import Probe, TrainingThread
from moevement_ext.regroup.gloo import Gloo
from moevement_ext.regroup.waits import in_time
from moevement_ext.system.leaving import leave

LIMIT = timedelta(seconds=120)
"""Timeout of operations that take well under a second."""
NEVER_HUNG_S = 600.0


def connect(port: int) -> TCPStore:
    return TCPStore('127.0.0.1', port, is_master=False, timeout=LIMIT)


def member_of(
    port: int,
    rank: int = 0,
    world_size: int = 1,
    hang_timeout_s: float = NEVER_HUNG_S,
    stuck_timeout_s: float = 0.0,
) -> tuple[Membership, TCPStore]:
    """A member that is not settled yet and checks its training thread often."""
    round_watch.LOOK_S = membership.LOOK_S = 0.05
    store = connect(port)
    place = Rendezvous(store, rank, world_size)
    report = Report(survivor=False, node='a', process=100 + rank, windows=[])
    return Membership.join(place, LIMIT, hang_timeout_s, lambda: report, stuck_timeout_s), store


def init_gloo(store: Store, rank: int = 0, world_size: int = 1) -> None:
    dist.init_process_group('gloo', store=store, rank=rank, world_size=world_size, timeout=LIMIT)


def settled(port: int, stuck_timeout_s: float = 0.0) -> tuple[Membership, TCPStore]:
    """A rank alone in its job, with a round watch."""
    member, store = member_of(port, stuck_timeout_s=stuck_timeout_s)
    init_gloo(PrefixStore('pg', store))
    member.settle()
    member.watch('gloo', int)
    return member, store


def waits_for_a_peer(port: int) -> None:
    """Wait in a store barrier, which aborting process groups does not end."""
    standstill._OUT_OF_WAITS_S = 1.0
    _, store = settled(port)
    end_round(store, 0, 'another rank died')
    dist.distributed_c10d._store_based_barrier(0, store, 'never', 2, timedelta(hours=1))


def is_never_unblocked(port: int) -> None:
    membership._UNBLOCK_S = 1.0
    Gloo.close = lambda self, backends: threading.Event().wait()  # type: ignore[method-assign]
    member, store = settled(port)
    end_round(store, 0, 'another rank died')
    member.leave('another rank died')


def loses_its_gpu(port: int) -> None:
    def lost(gloo: Gloo) -> NoReturn:
        raise RuntimeError('CUDA error: unspecified launch failure')

    Gloo.check_device = lost  # type: ignore[method-assign]
    member, _ = settled(port)
    member.leave('rank 1 died')


def never_sets_up(port: int) -> None:
    """Join as the last of three ranks, and hang in the set-up."""
    member_of(port, 2, 3, stuck_timeout_s=1.0)
    threading.Event().wait()


def wait_until(true: Callable[[], object]) -> None:
    while not true():
        threading.Event().wait(0.01)


def waits_for_too_long(port: int, rank: int, hangs: bool) -> None:
    """Rank 0 waits for a message that rank 1 never sends; both have reported their progress.

    If rank 1 `hangs`, rank 0 has committed more.
    """
    member, store = member_of(port, rank, 2)
    init_gloo(PrefixStore('pg', store), rank, 2)
    member._standstill._timeout_s = 1.0
    member.committed = 8 if hangs and rank == 0 else 7
    member.settle()
    member.watch('gloo', int)
    wait_until(lambda: store.check(['progress/0/0', 'progress/0/1']))
    if rank == 0:
        try:
            dist.recv(torch.zeros(1), 1)
        except RuntimeError:
            print('the wait was ended', flush=True)
    else:
        while not member.broken:  # it makes progress
            sum(range(1000))
    store.add('out', 1)
    wait_until(lambda: store.add('out', 0) == (1 if hangs else 2))
    member._joined.watch.wait_until_woken()  # its thread may not start others while all end
    leave(0)  # a thread that waits in torch may abort a process that returns


def meets_at_a_barrier(port: int, rank: int) -> None:
    """Rank 1 arrives when rank 0 has waited for longer than a collective may take."""
    member, store = member_of(port, rank, 2)
    init_gloo(PrefixStore('pg', store), rank, 2)
    member._standstill._timeout_s = 1.0
    member.settle()
    look, told = TrainingThread.probe, connect(port)

    def look_and_tell(thread: TrainingThread) -> Probe:
        found = look(thread)
        if rank == 0 and found.waits_for_others and found.same_place_s > 1.5:
            told.set('go', '1')
        return found

    TrainingThread.probe = look_and_tell  # type: ignore[method-assign]
    member.watch('gloo', int)
    wait_until(lambda: rank == 0 or member.broken or store.check(['go']))  # as during a replay
    member.barrier('replayed')
    leave(0)


class _CountedLooks:
    """Replaces the module `time` for checks of training threads: a check takes 0.05 s."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)

    def monotonic(self) -> float:
        self._now_s += 0.05
        return self._now_s


def waits_without_a_store(port: int, iterations: int) -> None:
    """Other ranks arrive two checks later in each iteration, and not at all in the end."""
    hang_s, others, waited, seen = 1.0, threading.Semaphore(0), False, 0
    training_thread.time = _CountedLooks()  # type: ignore[assignment]
    init_gloo(HashStore())
    member, _ = member_of(port, hang_timeout_s=hang_s)
    look = TrainingThread.probe

    def look_and_come(thread: TrainingThread) -> Probe:
        nonlocal waited, seen
        found = look(thread)
        if not waited and found.same_place_s > hang_s:
            waited = True
            print('waited for long', flush=True)
        seen += member.store_lost.is_set()
        iteration = seen // 3
        if seen % 3 == 2 and iteration < iterations:
            others.release()
            wait_until(lambda: member.committed == iteration)
        return found

    TrainingThread.probe = look_and_come  # type: ignore[method-assign]
    member.settle()
    member.watch('gloo', others.release)
    for iteration in range(iterations):
        in_time(others.acquire, NEVER_HUNG_S)  # counts as a wait of the engine for other ranks
        if member.broken:
            break
        print('got to', iteration, flush=True)
        member.committed = iteration
    else:
        in_time(others.acquire, NEVER_HUNG_S)
    print('woken up:', member.broken, flush=True)
    leave(0)
