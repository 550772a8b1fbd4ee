# SPDX-License-Identifier: Apache-2.0
"""A thread that stands still is told from one that moves and from one that waits for others."""

import ctypes
import hashlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, Work

from moevement_ext import faults
from moevement_ext.membership import training_thread
from moevement_ext.membership.rendezvous import Rendezvous
from moevement_ext.membership.training_thread import Look, TrainingThread
from moevement_ext.memory import cuda_driver
from moevement_ext.regroup import waits

pytestmark = pytest.mark.timed

LOOKS = 20


@contextmanager
def running(body: Callable[[], object]) -> Iterator[TrainingThread]:
    made: list[TrainingThread] = []
    ready = threading.Event()

    def run() -> None:
        made.append(TrainingThread())
        ready.set()
        body()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    yield made[0]


def looks(thread: TrainingThread, count: int = LOOKS) -> list[Look]:
    found = []
    for _ in range(count):
        time.sleep(0.05)
        found.append(thread.look())
    return found


def looks_once_it_waits(thread: TrainingThread) -> list[Look]:
    """Looks at one that comes to wait for others sooner or later."""
    while not thread.look().waits_for_others:
        time.sleep(0.05)
    return looks(thread, LOOKS // 2)


def looks_with_shares(thread: TrainingThread) -> Iterator[tuple[Look, float]]:
    """Looks, and what share of the time since the look before the thread has computed, at least."""
    clock = time.pthread_getcpuclockid(thread._ident)
    before = time.monotonic()
    thread.look()
    while True:
        computed_s = time.clock_gettime(clock)
        time.sleep(0.05)
        computed_s = time.clock_gettime(clock) - computed_s
        now = time.monotonic()
        look = thread.look()
        yield look, computed_s / (time.monotonic() - before)
        before = now


def test_a_thread_that_is_stuck_stands_still_and_waits_for_nobody() -> None:
    release = threading.Event()
    with running(release.wait) as thread:
        last = looks(thread)[-1]
        stack = thread.stack()
    release.set()
    assert last.still_s > LOOKS / 2 * 0.05 and not last.waits_for_others
    assert 'in run' in stack and 'body()' in stack


def test_a_thread_that_has_ended_is_nowhere_for_ever() -> None:
    """A loop of one's own may run on a thread that fails; its process is looked at all the same."""
    with running(lambda: None) as thread:
        last = looks(thread)[-1]
    assert last.waits_for_others and last.same_place_s > LOOKS / 2 * 0.05


def test_a_loader_that_hangs_on_purpose_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f'stall.{os.getpid()}'
    file.touch()
    monkeypatch.setattr(faults, '_stall_file', str(tmp_path / 'stall'))
    with running(faults.stall) as thread:
        found = [thread.look()]
        while found[-1].still_s <= LOOKS / 2 * 0.05:  # it looks for its file now and then
            found += looks(thread, 1)
    file.unlink()
    assert not any(look.waits_for_others for look in found)


def test_a_thread_that_computes_moves() -> None:
    over = threading.Event()

    def compute() -> None:
        total = 0
        while not over.is_set():
            for i in range(1000):
                total += i % 7
                total -= abs(-i)

    with running(compute) as thread:
        shares = looks_with_shares(thread)
        moved = 0
        while moved < LOOKS:
            look, share = next(shares)
            if share > 0.1:  # a machine with much else to do may leave it less
                assert look.still_s == 0
                moved += 1
    over.set()


def test_a_thread_that_only_looks_again_and_again_stays_at_its_place() -> None:
    """As one that waits for a GPU; it computes, and gets on when its program says so."""

    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            hashlib.pbkdf2_hmac('sha256', b'', b'', 4_000_000)  # one call, without the GIL

    with running(compute) as thread:
        shares = looks_with_shares(thread)
        look, share = next(shares)
        while share < 0.1 or look.same_place_s <= 2 * 0.05:
            look, share = next(shares)
        thread.moved()
        after = thread.look()
    over.set()
    assert look.still_s == 0 and after.same_place_s == 0


def test_a_thread_at_a_barrier_waits_for_others() -> None:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=60)

    def meet(rank: int = 0) -> None:
        Rendezvous(store.clone(), rank, 2).meet(lambda: b'', timeout)

    with running(meet) as thread:
        found = looks_once_it_waits(thread)
    meet(1)
    assert all(look.waits_for_others for look in found)


@pytest.mark.parametrize('seen', [waits.install, waits.show])
def test_a_thread_in_a_collective_waits_for_others(
    seen: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Work, 'wait', waits._torch_wait)
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)

    def peer() -> None:
        other = dist.ProcessGroupGloo(store.clone(), 1, 2, timedelta(seconds=60))
        release.wait()
        other.barrier().wait()

    release = threading.Event()
    helper = threading.Thread(target=peer, daemon=True)
    helper.start()
    mine = dist.ProcessGroupGloo(store.clone(), 0, 2, timedelta(seconds=60))
    seen()
    try:
        with running(lambda: mine.barrier().wait()) as thread:
            found = looks_once_it_waits(thread)
    finally:
        release.set()
        helper.join(30)
    assert all(look.waits_for_others for look in found)


def test_time_for_which_the_whole_process_was_stopped_does_not_count() -> None:
    release = threading.Event()
    with running(release.wait) as thread:
        looks(thread, 3)
        thread._looked -= 1000.0  # as if nobody had looked for so long
        assert thread.look().still_s < 5.0
    release.set()


@pytest.mark.parametrize(('each_second', 'stuck'), [(2**20, False), (2**10, True)])
def test_a_thread_whose_process_moves_bytes_is_not_stuck(
    each_second: int, stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense save takes longer than a thread may stand still; a heartbeat is no save."""
    counts = itertools.count(0, each_second)
    monkeypatch.setattr(training_thread, '_bytes_moved', lambda: next(counts))
    release = threading.Event()
    with running(release.wait) as thread:
        looks(thread, 3)
        found = []
        for _ in range(10):
            thread._looked -= 1.0
            found.append(thread.look())
        monkeypatch.setattr(training_thread, '_bytes_moved', lambda: 0)
        thread._looked -= 1.0
        over = thread.look()
    release.set()
    assert [look.still_s > 0 for look in found] == len(found) * [stuck]
    assert over.still_s >= 1.0 and found[-1].same_place_s > 9.0


@pytest.mark.parametrize('writer', [threading.Thread, multiprocessing.get_context('spawn').Process])
def test_bytes_of_all_threads_and_children_are_counted(
    writer: Callable[..., threading.Thread], tmp_path: Path
) -> None:
    before = training_thread._bytes_moved()
    assert training_thread._bytes_moved() - before < 2**10, 'looking counts'
    write = writer(target=(tmp_path / 'shard').write_bytes, args=(bytes(2**22),))
    write.start()
    write.join()
    assert training_thread._bytes_moved() - before >= 2**22


def test_a_node_that_hides_processes_of_others_is_looked_at_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `/proc` does that is mounted with `hidepid=1`."""

    def hidden(process: psutil.Process, recursive: bool) -> list[psutil.Process]:
        raise PermissionError(1, 'not permitted', '/proc/1/stat')

    monkeypatch.setattr(psutil.Process, 'children', hidden)
    before = training_thread._bytes_moved()
    write = threading.Thread(target=(tmp_path / 'shard').write_bytes, args=(bytes(2**20),))
    write.start()
    write.join()
    assert training_thread._bytes_moved() - before >= 2**20


class Queue:
    """Work of the second GPU; a machine without one can tell who asks the driver how.

    Args:
        status: what the driver says of it.
        cuda_stream: its handle; that of the default stream is 0.
    """

    device = torch.device('cuda', 1)

    def __init__(self, status: int, cuda_stream: int) -> None:
        self.status = status
        self.cuda_stream = cuda_stream
        self.asked_on: list[torch.device] = []
        """The current device of the thread that asked, each time."""
        self._bound: dict[int, torch.device] = {}

    def bind(self, device: torch.device) -> None:
        self._bound[threading.get_ident()] = device

    def cuStreamQuery(self, stream: ctypes.c_void_p) -> int:  # noqa: N802 - CUDA's name
        assert stream.value == (self.cuda_stream or None)
        self.asked_on.append(self._bound.get(threading.get_ident(), torch.device('cuda', 0)))
        return self.status


@pytest.mark.parametrize(
    ('status', 'waits'), [(0, False), (600, True), (719, True)], ids=['idle', 'busy', 'lost']
)
@pytest.mark.parametrize('handle', [0, 2**40])
def test_the_gpu_of_the_training_thread_is_looked_at(
    handle: int, status: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, main = Queue(status, handle), threading.get_ident()
    queues = {main: Queue(0, 1)}
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(
        torch.cuda, 'current_stream', lambda: queues.get(threading.get_ident(), queue)
    )
    monkeypatch.setattr(torch.cuda, 'default_stream', torch.cuda.current_stream)
    monkeypatch.setattr(torch.cuda, 'set_device', queue.bind)
    monkeypatch.setattr(training_thread, 'driver', lambda: queue)
    release = threading.Event()
    with running(release.wait) as thread:
        found = looks(thread, 3)
    release.set()
    assert [look.waits_for_others for look in found[1:]] == [waits, waits]
    assert set(queue.asked_on) == {Queue.device}


def test_the_driver_may_not_answer_for_long_and_nobody_else_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The C library instead, which can be made to wait."""
    monkeypatch.setattr(cuda_driver, '_DRIVER', 'libc.so.6')
    sleep = cuda_driver.driver.__wrapped__().usleep
    asking = threading.Thread(target=sleep, args=(1_000_000,))
    asking.start()
    rounds = 0
    while asking.is_alive():
        time.sleep(0.01)
        rounds += 1
    assert rounds > 3, 'nothing else ran while the driver was asked'


def test_a_thread_in_a_call_of_cuda_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    # `synchronize` lies in the same file, but may be that for machines without a GPU.
    monkeypatch.setattr(torch.cuda, '_lazy_init', release.wait)
    monkeypatch.setattr(torch._C, '_cuda_ipc_collect', lambda: None, raising=False)
    with running(torch.cuda.ipc_collect) as thread:
        found = looks(thread, 3)
    release.set()
    assert all(look.waits_for_others for look in found)
