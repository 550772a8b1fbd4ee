# SPDX-License-Identifier: Apache-2.0
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from moevement_ext.capture import copier
from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import Piece, _Copy, in_pieces

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


def test_wait_without_a_capture_takes_no_time(rig: Rig) -> None:
    assert rig.copier.wait() == 0
    rig.capture(copy_of(1))
    assert rig.copier.wait() >= 0
    assert rig.copier.wait() == 0


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
