# SPDX-License-Identifier: Apache-2.0
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from moevement_ext.errors import EXIT_STUCK
from moevement_ext.membership import round_watch as detect
from moevement_ext.membership.counters import count_heartbeats
from moevement_ext.membership.rendezvous import end_round, present_round
from moevement_ext.membership.round_watch import Connections, RoundWatch

pytestmark = pytest.mark.timed

DEADLINE_S = 60.0
"""Timeout of an event that is due soon."""
TIMEOUT = timedelta(seconds=DEADLINE_S)


def connect(port: int) -> TCPStore:
    return TCPStore('127.0.0.1', port, is_master=False, timeout=TIMEOUT)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == 'sparse-ckpt-watch']


def wait_for_end_of_threads() -> None:
    """Wait until each watch thread has ended by itself."""
    for thread in threads():
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


class Job:
    """Ranks that watch the present round of a real store, and the reasons of their wake-ups."""

    def __init__(self) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        assert present_round(self.store) == 0
        self.watches: list[RoundWatch] = []
        self.woken: queue.Queue[tuple[int, str]] = queue.Queue()

    def watch(self, rank: int) -> RoundWatch:
        watch = RoundWatch(
            Connections(lambda: connect(self.store.port)),
            present_round(self.store),
            rank,
            lambda reason: self.woken.put((rank, reason)),
        )
        self.watches.append(watch.start())
        return watch

    def next_woken(self) -> tuple[int, str]:
        return self.woken.get(timeout=DEADLINE_S)

    def heartbeats(self, rank: int) -> int:
        return count_heartbeats(self.store, [rank])[rank]

    def end(self) -> None:
        """Stop all watches and break the round, which ends their threads."""
        for watch in self.watches:
            watch.stop()
        end_round(self.store, present_round(self.store), 'the test is over')
        wait_for_end_of_threads()


def wait_for_heartbeats(job: Job, more: int = 3) -> None:
    """Wait for more heartbeats of rank 0."""
    deadline, before = time.monotonic() + DEADLINE_S, job.heartbeats(0)
    while job.heartbeats(0) < before + more:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.end()


@pytest.fixture
def fast_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, 'LOOK_S', 0.05)
    monkeypatch.setattr(detect, 'LOOKS_PER_HEARTBEAT', 1)


def test_all_ranks_are_woken_when_the_round_is_broken(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, 'LOOK_S', 2 * DEADLINE_S)
    for round in range(5):
        watches = [job.watch(rank) for rank in range(3)]
        end_round(job.store, round, f'reason {round}')
        woken = sorted(job.next_woken() for _ in watches)
        assert woken == [(rank, f'reason {round}') for rank in range(3)]
        for watch in watches:
            assert watch.broken.is_set() and watch.reason == f'reason {round}'
            watch.stop()
    assert job.woken.empty()
    for thread in threads():
        thread.name = 'sleeps'  # until its next heartbeat is due


def test_the_looking_thread_ends_a_round_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, 'LOOK_S', 2 * DEADLINE_S)
    watches = [job.watch(rank) for rank in range(2)]
    watches[1].end_soon('rank 2 is lost')
    assert sorted(job.next_woken() for _ in watches) == [
        (0, 'rank 2 is lost'),
        (1, 'rank 2 is lost'),
    ]
    wait_for_the_next_round(job)
    watches[1].end_soon('again')
    assert job.woken.empty()


def test_watch_completes_the_break_of_a_dead_announcer(job: Job) -> None:
    """The reason is set, but not the number of the next round."""
    job.watch(0)
    job.store.compare_set('broken/0', '', '12.5 -1 the launcher of node 3 was killed')
    assert job.next_woken() == (0, 'the launcher of node 3 was killed')
    wait_for_the_next_round(job)


def wait_for_the_next_round(job: Job) -> None:
    """The number is raised after all ranks are woken."""
    deadline = time.monotonic() + DEADLINE_S
    while present_round(job.store) == 0:
        assert time.monotonic() < deadline


def test_stop_ends_heartbeats_and_wake_ups(job: Job, fast_heartbeats: None) -> None:
    watch = job.watch(0)
    wait_for_heartbeats(job, 1)
    assert len(threads()) == 2
    watch.stop()
    end_round(job.store, 0, 'after the stop')
    wait_for_end_of_threads()
    heartbeats = job.heartbeats(0)
    time.sleep(0.2)
    assert job.heartbeats(0) == heartbeats
    assert job.woken.empty() and not watch.broken.is_set() and watch.reason is None


def test_stop_waits_for_a_wake_up_in_progress(job: Job) -> None:
    """After `stop`, no thread of this process is being unblocked."""
    waking, go_on, order = threading.Event(), threading.Event(), list[str]()

    def wake(reason: str) -> None:
        waking.set()
        assert go_on.wait(DEADLINE_S)
        order.append('woken')

    opened = Connections(lambda: connect(job.store.port))
    watch = RoundWatch(opened, 0, 0, wake).start()
    end_round(job.store, 0, 'test')
    assert waking.wait(DEADLINE_S)

    def stop() -> None:
        watch.stop()
        order.append('stopped')

    stopping = threading.Thread(target=stop)
    stopping.start()
    stopping.join(0.2)  # it would have ended by now if it did not wait
    assert stopping.is_alive()
    go_on.set()
    stopping.join(DEADLINE_S)
    assert order == ['woken', 'stopped']


LOST = 'the connection to the store of the launcher was lost'


def connections(port: int) -> set[int]:
    """File descriptors of this process that are connected to this port."""
    found = psutil.Process().net_connections('tcp')
    return {one.fd for one in found if one.raddr and one.raddr.port == port}


def test_lost_connections_are_reestablished(
    job: Job, fast_heartbeats: None, caplog: pytest.LogCaptureFixture
) -> None:
    of_the_test = connections(job.store.port)
    watch = job.watch(0)
    wait_for_heartbeats(job)
    for fd in connections(job.store.port) - of_the_test:
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    wait_for_heartbeats(job)
    assert not watch.broken.is_set()
    assert caplog.text.count(LOST) == 1
    end_round(job.store, 0, 'rank 7 died')
    assert job.next_woken() == (0, 'rank 7 died')


class Deaf(TCPStore):
    """A connection that was silently dropped while idle."""

    def wait(self, *args: object) -> None:  # type: ignore[override]
        threading.Event().wait(DEADLINE_S)


def test_heartbeats_detect_the_end_if_the_wake_up_is_lost(job: Job, fast_heartbeats: None) -> None:
    woken: queue.Queue[str] = queue.Queue()
    port = job.store.port
    deaf = Connections(lambda: Deaf('127.0.0.1', port, is_master=False))
    watch = RoundWatch(deaf, 0, 0, woken.put).start()
    end_round(job.store, 0, 'rank 7 died')
    assert woken.get(timeout=DEADLINE_S / 4) == 'rank 7 died'
    watch.stop()
    for thread in threads():
        thread.name = 'deaf'  # it never ends


def test_heartbeats_continue_until_the_rank_has_left(job: Job, fast_heartbeats: None) -> None:
    watch = job.watch(0)
    end_round(job.store, 0, 'rank 7 died')
    job.next_woken()
    wait_for_heartbeats(job)
    watch.stop()


def test_process_that_cannot_end_its_waits_ends_itself(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL it would wait for ever, with heartbeats, and all other ranks for it."""
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(detect, 'end_at_once', ended.put)

    def no_more_threads(reason: str) -> None:
        raise RuntimeError("can't start new thread")

    watch = job.watch(0)
    watch._on_broken = no_more_threads
    end_round(job.store, 0, 'rank 1 was killed')
    assert ended.get(timeout=DEADLINE_S) == EXIT_STUCK
