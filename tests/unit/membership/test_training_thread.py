# SPDX-License-Identifier: Apache-2.0
"""A stuck thread is distinguished from one that progresses and from one that waits for others."""

import ctypes
import hashlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore, Work

from moevement_ext import faults
from moevement_ext.membership import standstill, training_thread
from moevement_ext.membership.rendezvous import Rendezvous
from moevement_ext.membership.standstill import Standstill
from moevement_ext.membership.training_thread import Probe, TrainingThread
from moevement_ext.memory import device
from moevement_ext.regroup import waits
from tests.stand_ins.capture_mode import Driver

pytestmark = pytest.mark.timed

STEP_S = 0.5
"""Time between two checks."""


class Clock:
    """Replaces the module `time` for checks of threads: the test sets the time."""

    pthread_getcpuclockid = staticmethod(time.pthread_getcpuclockid)

    def __init__(self) -> None:
        self.now = self.computed_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def clock_gettime(self, clock: int) -> float:
        """CPU seconds of the thread."""
        return self.computed_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(training_thread, 'time', clock)
    monkeypatch.setattr(training_thread, '_bytes_moved', lambda: 0)
    return clock


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


def look_after(clock: Clock, thread: TrainingThread, share: float = 0.0) -> Probe:
    """The next check, before which the thread has computed for a share of the time."""
    clock.now += STEP_S
    clock.computed_s += share * STEP_S
    return thread.probe()


def looks_until_still(
    clock: Clock, thread: TrainingThread, place: str = 'waiter.acquire()'
) -> list[Probe]:
    """The last checks of a thread that eventually blocks at this line."""
    while place not in thread.stack():
        time.sleep(0.001)
    found = [look_after(clock, thread)]
    while found[-1].same_place_s < 10 * STEP_S:
        time.sleep(0.01)
        found.append(look_after(clock, thread))
    return found[-10:]


def test_stuck_thread_is_still_and_does_not_wait_for_others(clock: Clock) -> None:
    release = threading.Event()
    with running(release.wait) as thread:
        found = looks_until_still(clock, thread)
        stack = thread.stack()
    release.set()
    assert [look.still_s for look in found] == [STEP_S * n for n in range(1, 11)]
    assert not any(look.waits_for_others for look in found)
    assert 'in run' in stack and 'body()' in stack


def test_injected_stall_does_not_count_as_a_wait_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    file = tmp_path / f'stall.{os.getpid()}'
    file.touch()
    monkeypatch.setenv('MOEVEMENT_STALL_FILE', str(tmp_path / 'stall'))
    with running(faults.stall) as thread:
        found = looks_until_still(clock, thread, 'in stall')  # it polls for its file
    file.unlink()
    assert not any(look.waits_for_others for look in found)


def test_thread_at_another_place_has_moved(clock: Clock) -> None:
    first, second = threading.Event(), threading.Event()
    with running(lambda: (first.wait(), second.wait())) as thread:
        before = looks_until_still(clock, thread)[-1]
        first.set()
        while look_after(clock, thread).same_place_s >= before.same_place_s:
            time.sleep(0.001)
    second.set()


def test_thread_that_computes_at_one_place_is_not_still(clock: Clock) -> None:
    release = threading.Event()
    with running(release.wait) as thread:
        before = looks_until_still(clock, thread)[-1]
        idle = look_after(clock, thread, share=0.04)
        look = look_after(clock, thread, share=0.06)
        thread.moved()
        after = look_after(clock, thread)
    release.set()
    assert idle.still_s > before.still_s
    assert (look.still_s, look.same_place_s) == (0, before.same_place_s + 2 * STEP_S)
    assert after.same_place_s == 0


def test_cpu_time_of_other_threads_does_not_count() -> None:
    def compute() -> None:
        while not over.is_set():
            hashlib.pbkdf2_hmac('sha256', b'', b'', 10_000)  # releases the GIL

    over = threading.Event()
    with running(compute) as busy, running(over.wait) as idle:
        idle_s, began_s = idle._computed_until_now(), busy._computed_until_now()
        while busy._computed_until_now() < began_s + 0.2:
            time.sleep(0.001)
        assert idle._computed_until_now() - idle_s < 0.1
    over.set()


def looks_once_it_waits(thread: TrainingThread) -> list[Probe]:
    """Checks of a thread that eventually waits for others."""
    while not thread.probe().waits_for_others:
        time.sleep(0.001)
    return [thread.probe() for _ in range(10)]


def test_thread_at_a_barrier_waits_for_others() -> None:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=60)

    def meet(rank: int = 0) -> None:
        Rendezvous(store.clone(), rank, 2).meet(lambda: b'', timeout)

    with running(meet) as thread:
        found = looks_once_it_waits(thread)
    meet(1)
    assert all(look.waits_for_others for look in found)


@pytest.mark.parametrize('seen', [waits.install, waits.show])
def test_thread_in_a_collective_waits_for_others(
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


def test_time_of_a_stopped_process_does_not_count(clock: Clock) -> None:
    release = threading.Event()
    with running(release.wait) as thread:
        before = looks_until_still(clock, thread)[-1]
        clock.now += 1000.0
        assert thread.probe().still_s - before.still_s == training_thread._MOST_BETWEEN_CHECKS_S
    release.set()


@pytest.mark.parametrize(('each_second', 'stuck'), [(2**20, False), (2**10, True)])
def test_thread_of_a_process_that_moves_bytes_is_not_stuck(
    each_second: int, stuck: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense save takes longer than the stuck timeout; the bytes of a heartbeat do not count."""
    counts = itertools.count(0, int(each_second * STEP_S))
    monkeypatch.setattr(training_thread, '_bytes_moved', lambda: next(counts))
    release = threading.Event()
    with running(release.wait) as thread:
        found = looks_until_still(clock, thread)[1:]
        monkeypatch.setattr(training_thread, '_bytes_moved', lambda: 0)
        over = look_after(clock, thread)
    release.set()
    assert [look.still_s > 0 for look in found] == len(found) * [stuck]
    assert over.still_s >= STEP_S and found[-1].same_place_s >= 9 * STEP_S


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


class Queue:
    """Stream of the second GPU; records the current device of each querying thread.

    While the training thread records a graph, only threads in relaxed mode may query it.

    Args:
        status: the driver's status of the stream.
        cuda_stream: its handle; that of the default stream is 0.
    """

    device = torch.device('cuda', 1)

    def __init__(self, status: int, cuda_stream: int) -> None:
        self.status = status
        self.cuda_stream = cuda_stream
        self.asked_on: list[torch.device] = []
        """The current device of the querying thread, for each query."""
        self._bound: dict[int, torch.device] = {}
        self._relaxed: set[int] = set()

    def bind(self, device: torch.device) -> None:
        self._bound[threading.get_ident()] = device

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self._relaxed.add(threading.get_ident())
        return Driver.cuThreadExchangeStreamCaptureMode(mode)

    def cuStreamQuery(self, stream: ctypes.c_void_p) -> int:  # noqa: N802 - CUDA's name
        assert threading.get_ident() in self._relaxed
        assert stream.value == (self.cuda_stream or None)
        self.asked_on.append(self._bound.get(threading.get_ident(), torch.device('cuda', 0)))
        return self.status


def put_on_gpu(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is that of all threads but this one."""
    queues = {threading.get_ident(): Queue(0, 1)}
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(
        torch.cuda, 'current_stream', lambda: queues.get(threading.get_ident(), queue)
    )
    monkeypatch.setattr(torch.cuda, 'default_stream', torch.cuda.current_stream)
    monkeypatch.setattr(torch.cuda, 'set_device', queue.bind)
    for module in (training_thread, device):
        monkeypatch.setattr(module, 'driver', lambda: queue)


@pytest.mark.parametrize(
    ('status', 'waits'), [(0, False), (600, True), (719, True)], ids=['idle', 'busy', 'lost']
)
@pytest.mark.parametrize('handle', [0, 2**40])
def test_stream_of_the_training_thread_is_queried(
    handle: int, status: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(status, handle)
    put_on_gpu(queue, monkeypatch)
    release = threading.Event()
    with running(release.wait) as thread:
        thread.probe()  # the thread may not have blocked yet
        found = [thread.probe() for _ in range(2)]
    release.set()
    assert [look.waits_for_others for look in found] == [waits, waits]
    assert set(queue.asked_on) == {Queue.device}


def test_blocking_driver_call_does_not_block_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The C library replaces the driver: it waits for a byte of this thread or of a process."""
    monkeypatch.setattr(device, '_DRIVER', 'libc.so.6')
    read, found = device.driver.__wrapped__().read, ctypes.create_string_buffer(1)
    near, far = os.pipe()
    command = ['sh', '-c', 'sleep 30; printf c']
    with subprocess.Popen(command, stdout=far, start_new_session=True) as late:
        asking = threading.Thread(target=read, args=(near, found, 1))
        asking.start()
        time.sleep(0.1)  # the call has started; otherwise this test proves nothing
        os.write(far, b't')
        asking.join()
        os.killpg(late.pid, signal.SIGKILL)
    os.close(near)
    os.close(far)
    assert found.raw == b't', 'nothing else ran while the driver was asked'


@pytest.mark.parametrize(
    ('busy_s', 'replaced'), [(20.0, False), (40.0, True)], ids=['busy', 'stuck']
)
def test_busy_but_healthy_survivor_is_not_replaced(
    busy_s: float, replaced: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that it had queued still run when its collectives have been aborted."""
    queue = Queue(600, 0)
    ended: list[float] = []
    put_on_gpu(queue, monkeypatch)
    monkeypatch.setattr(standstill, 'time', clock)
    monkeypatch.setattr(standstill, 'replace_this_process', lambda *_: ended.append(clock.now))
    synchronized = threading.Event()
    with running(synchronized.wait) as thread:
        watching = Standstill(rank=0, timeout_s=600.0, stuck_timeout_s=600.0)
        watching.thread = thread
        watching.unblocked_at = clock.now
        while clock.now < busy_s and not ended:
            clock.now += STEP_S
            watching.check(HashStore(), 0, [1], 7)
        synchronized.set()
    assert bool(ended) is replaced
    assert not ended or ended[0] > standstill._OUT_OF_QUEUE_S
