# SPDX-License-Identifier: Apache-2.0
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch

from moevement_ext.capture import copier
from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import Piece, _Copy, in_pieces
from moevement_ext.memory import device
from tests.stand_ins.capture_mode import Driver

DEADLINE_S = 30.0
"""Timeout of an event that is due at once."""


class Gated(list[Piece]):
    """Copies that block the copying thread until the gate opens."""

    def __init__(self, *copies: _Copy) -> None:
        super().__init__(in_pieces(copies))
        self.gate = threading.Event()

    def __iter__(self) -> Iterator[Piece]:
        assert self.gate.wait(DEADLINE_S)
        return super().__iter__()


class Rig:
    def __init__(self) -> None:
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.sealed: queue.Queue[str] = queue.Queue()
        self.copier = Copier(torch.device('cpu'))

    def capture(self, *copies: _Copy, name: str = '') -> None:
        pieces = in_pieces(copies)
        self.copier.start([], lambda: pieces, lambda: self.sealed.put(name), self.errors.put)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.copier.stop()


def copy_of(value: float, count: int = 1000) -> _Copy:
    return _Copy(torch.zeros(count), torch.full((count,), value))


def test_wait_returns_after_the_copies(rig: Rig) -> None:
    copy = copy_of(5)
    stable = Gated(copy)
    rig.copier.start([], lambda: stable, lambda: None, rig.errors.put)
    waiter = threading.Thread(target=rig.copier.wait)
    waiter.start()
    waiter.join(0.2)  # a broken wait would have returned by now
    assert waiter.is_alive()
    assert not copy.target.any()
    stable.gate.set()
    waiter.join(DEADLINE_S)
    assert torch.equal(copy.target, copy.source)


def test_volatile_slices_are_copied_before_start_returns(rig: Rig) -> None:
    volatile, stable = copy_of(3), Gated(copy_of(4))
    rig.copier.start(in_pieces([volatile]), lambda: stable, lambda: None, rig.errors.put)
    volatile.source.fill_(-1)  # as forward does while the other copies are pending
    assert (volatile.target == 3).all()
    stable.gate.set()
    rig.copier.wait()


def test_sealing_follows_the_copies_and_delays_no_wait(rig: Rig) -> None:
    copy, gate = copy_of(5), threading.Event()
    seen = []

    def seal() -> None:
        assert gate.wait(DEADLINE_S)
        seen.append(copy.target.clone())

    rig.copier.start([], lambda: in_pieces([copy]), seal, rig.errors.put)
    rig.copier.wait()
    assert not seen
    gate.set()
    rig.copier.drain()
    assert torch.equal(seen[0], copy.source)


def test_failed_copy_is_reported_and_not_sealed(rig: Rig) -> None:
    rig.capture(_Copy(torch.zeros(3), torch.zeros(4)), name='broken')
    rig.copier.wait()
    assert isinstance(rig.errors.get(timeout=DEADLINE_S), RuntimeError)
    rig.capture(copy_of(1), name='next')
    rig.copier.wait()
    assert rig.sealed.get(timeout=DEADLINE_S) == 'next'
    assert rig.errors.empty()


def test_error_of_the_failure_callback_does_not_reach_training(rig: Rig) -> None:
    def told(error: Exception) -> None:
        raise OSError('no space for the event') from error

    pieces = in_pieces([_Copy(torch.zeros(3), torch.zeros(4))])
    rig.copier.start([], lambda: pieces, lambda: None, told)
    rig.copier.wait()
    rig.capture(copy_of(1), name='next')
    rig.copier.wait()
    assert rig.sealed.get(timeout=DEADLINE_S) == 'next'


def test_rate_counts_completed_copies_only(rig: Rig) -> None:
    assert rig.copier.bytes_per_s() is None
    copies = [copy_of(value, count=2**20) for value in range(3)]
    began = time.perf_counter()
    rig.capture(*copies)
    rig.copier.wait()
    rate = rig.copier.bytes_per_s()
    assert rate is not None
    assert rate > 3 * 2**22 / (time.perf_counter() - began)
    rig.capture(copies[0], _Copy(torch.zeros(3), torch.zeros(4)))
    rig.copier.wait()
    assert rig.copier.bytes_per_s() == rate, 'what has failed is not counted'


def test_rate_follows_a_link_that_becomes_slower(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After weeks of training an average of all copies would hardly change any more."""
    clock, copy_s = [0.0], 0.001

    def copy(*given: Any, **how: Any) -> None:
        clock[0] += copy_s

    monkeypatch.setattr(copier, 'copy_all', copy)
    monkeypatch.setattr(copier.time, 'perf_counter', lambda: clock[0])
    piece = copy_of(1)

    def rate_after(slots: int) -> float | None:
        for _ in range(slots):
            rig.capture(piece)
            rig.copier.wait()
        return rig.copier.bytes_per_s()

    fast = rate_after(200)
    copy_s = 0.01
    slow = rate_after(copier._SLOTS_MEASURED)
    assert fast is not None and slow == pytest.approx(fast / 10)


def test_next_slot_is_sealed_after_a_failed_seal(rig: Rig) -> None:
    def fail() -> None:
        raise OSError('tmpfs is gone')

    rig.copier.start([], lambda: in_pieces([copy_of(1)]), fail, rig.errors.put)
    rig.copier.wait()
    rig.capture(copy_of(1), name='next')
    rig.copier.drain()
    assert str(rig.errors.get(timeout=DEADLINE_S)) == 'tmpfs is gone'
    assert rig.sealed.get(timeout=DEADLINE_S) == 'next'


def test_drain_and_stop_finish_started_captures(rig: Rig) -> None:
    for name in ('a', 'b', 'c'):
        rig.capture(copy_of(1), name=name)
    rig.copier.drain()
    assert [rig.sealed.get_nowait() for _ in range(3)] == ['a', 'b', 'c']
    rig.capture(copy_of(1), name='d')
    rig.copier.stop()
    assert rig.sealed.get_nowait() == 'd'


def test_captures_neither_allocate_nor_keep_memory(rig: Rig) -> None:
    copy = copy_of(1, count=2**21)  # 8 MiB
    place, threads = copy.target.data_ptr(), threading.active_count()
    process = psutil.Process()
    for iteration in range(100):
        if iteration == 5:
            before, threads = process.memory_info().rss, threading.active_count()
        copies = Gated(copy)
        copies.gate.set()
        rig.copier.start([], lambda copies=copies: copies, lambda: None, rig.errors.put)
        rig.copier.wait()
        copy.source.fill_(iteration)
    rig.copier.drain()
    assert copy.target.data_ptr() == place
    assert process.memory_info().rss - before < copy.source.nbytes
    assert threading.active_count() == threads
    kept = weakref.ref(copies)
    del copies
    assert kept() is None


# The order of the copier's GPU calls, on a fake device; `tests/gpu` uses a real one

PIECES = 5


class Event:
    """Reached once `synchronize` is called; recorded a millisecond after the previous event."""

    clock = itertools.count()

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing = enable_timing
        self.blocking = blocking
        self.at: int | None = None
        self.reached = False

    def record(self, stream: object = None) -> None:
        self.at = next(Event.clock)

    def synchronize(self) -> None:
        assert self.blocking, 'a thread that waits would spin'
        self.reached = True

    def elapsed_time(self, end: 'Event') -> float:
        assert self.timing
        assert end.timing
        assert end.reached
        assert self.at is not None
        assert end.at is not None
        return float(end.at - self.at)


class Stream:
    """Keeps the events recorded on it and the events it waits for."""

    made: 'list[Stream]' = []

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority
        self.recorded: list[Event] = []
        self.waits_for: list[Event] = []
        self.idle = True
        Stream.made.append(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        self.recorded.append(event)
        return event

    def wait_event(self, event: Event) -> None:
        self.waits_for.append(event)

    def synchronize(self) -> None:
        self.idle = True


class Gpu:
    """Fake device with the stream of training and the stream of the copier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Stream.made.clear()
        self.training = Stream()
        self.ahead: list[int] = []
        self.present = self.training
        self.fail_at = -1
        monkeypatch.setattr(torch.cuda, 'Stream', Stream)
        monkeypatch.setattr(torch.cuda, 'Event', Event)
        monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: self.training)
        monkeypatch.setattr(torch.cuda, 'stream', self._on)
        monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
        monkeypatch.setattr(device, 'driver', lambda: Driver)
        monkeypatch.setattr(copier, 'copy_all', self._copy)

    @property
    def side(self) -> Stream:
        return Stream.made[1]

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.present = stream
        yield
        self.present = self.training

    def _copy(self, targets: object, sources: object, non_blocking: bool) -> None:
        """Issue a piece; count the pieces whose arrival is not yet known."""
        assert non_blocking
        if len(self.ahead) == self.fail_at:
            raise RuntimeError('the copy cannot be issued')
        self.present.idle = False
        self.ahead.append(sum(not event.reached for event in self.side.recorded) + 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def on_gpu(gpu: Gpu) -> Iterator[Copier]:
    made = Copier(torch.device('cuda', 0))
    yield made
    made.stop()


def capture(on_gpu: Copier) -> float:
    """Capture some pieces; return the result of `wait`."""
    errors: queue.Queue[Exception] = queue.Queue()
    pieces = pieces_of(PIECES)
    on_gpu.start([], lambda: pieces, lambda: None, errors.put)
    held_up = on_gpu.wait()
    on_gpu.drain()
    assert errors.empty()
    return held_up


def pieces_of(count: int) -> list[Piece]:
    tensors = [torch.zeros(8) for _ in range(count)]
    return in_pieces((_Copy(tensor, tensor) for tensor in tensors), limit=tensors[0].nbytes)


def test_at_most_two_pieces_are_queued(on_gpu: Copier, gpu: Gpu) -> None:
    capture(on_gpu)
    assert gpu.ahead == [1, 2, 2, 2, 2]


def test_copies_follow_queued_work_and_precede_the_update(on_gpu: Copier, gpu: Gpu) -> None:
    capture(on_gpu)
    (ready,) = gpu.training.recorded
    assert gpu.side.waits_for == [ready]
    (copied,) = gpu.training.waits_for
    assert copied.at is not None
    assert all(event.at is not None and event.at < copied.at for event in gpu.side.recorded)
    assert gpu.side.priority == -1


def test_wait_returns_the_stall_that_the_device_measured(on_gpu: Copier) -> None:
    assert capture(on_gpu) == 0.0
    assert 0.001 <= capture(on_gpu) <= 0.02
    assert on_gpu.bytes_per_s() == pytest.approx(PIECES * 32 / 0.006, rel=0.2)


def test_issued_pieces_arrive_before_a_failed_copy_is_reported(on_gpu: Copier, gpu: Gpu) -> None:
    told: queue.Queue[bool] = queue.Queue()
    gpu.fail_at = 3
    pieces = pieces_of(PIECES)
    on_gpu.start([], lambda: pieces, lambda: None, lambda error: told.put(gpu.side.idle))
    on_gpu.wait()
    assert told.get_nowait(), 'told before wait has returned'
    assert len(gpu.ahead) == 3


def test_issued_pieces_have_arrived_when_start_fails(on_gpu: Copier, gpu: Gpu) -> None:
    gpu.fail_at = 2
    pieces = pieces_of(PIECES)
    with pytest.raises(RuntimeError, match='cannot be issued'):
        on_gpu.start(pieces, lambda: [], lambda: None, lambda error: None)
    assert gpu.training.idle
    assert on_gpu.wait() == 0.0
