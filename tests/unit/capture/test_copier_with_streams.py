# SPDX-License-Identifier: Apache-2.0
"""Order of the copier's GPU calls, on a fake device; `tests/gpu` uses a real one."""

import itertools
import queue
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moevement_ext.capture import copier as module
from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import Piece, _Copy, in_pieces
from moevement_ext.memory import device
from tests.stand_ins.capture_mode import Driver

DEADLINE_S = 30.0
"""Timeout of an event that is due at once."""
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
        monkeypatch.setattr(module, 'copy_all', self._copy)

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
def copier(gpu: Gpu) -> Iterator[Copier]:
    copier = Copier(torch.device('cuda', 0))
    yield copier
    copier.stop()


def capture(copier: Copier) -> float:
    """Capture some pieces; return the result of `wait`."""
    errors: queue.Queue[Exception] = queue.Queue()
    pieces = pieces_of(PIECES)
    copier.start([], lambda: pieces, lambda: None, errors.put)
    held_up = copier.wait()
    copier.drain()
    assert errors.empty()
    return held_up


def pieces_of(count: int) -> list[Piece]:
    tensors = [torch.zeros(8) for _ in range(count)]
    return in_pieces((_Copy(tensor, tensor) for tensor in tensors), limit=tensors[0].nbytes)


def test_at_most_two_pieces_are_queued(copier: Copier, gpu: Gpu) -> None:
    capture(copier)
    assert gpu.ahead == [1, 2, 2, 2, 2]


def test_copies_follow_queued_work_and_precede_the_update(copier: Copier, gpu: Gpu) -> None:
    capture(copier)
    (ready,) = gpu.training.recorded
    assert gpu.side.waits_for == [ready]
    (copied,) = gpu.training.waits_for
    assert copied.at is not None
    assert all(event.at is not None and event.at < copied.at for event in gpu.side.recorded)
    assert gpu.side.priority == -1


def test_wait_returns_the_stall_that_the_device_measured(copier: Copier) -> None:
    assert capture(copier) == 0.0
    assert 0.001 <= capture(copier) <= 0.02
    assert copier.bytes_per_s() == pytest.approx(PIECES * 32 / 0.006, rel=0.2)


def test_issued_pieces_arrive_before_a_failed_copy_is_reported(copier: Copier, gpu: Gpu) -> None:
    told: queue.Queue[bool] = queue.Queue()
    gpu.fail_at = 3
    pieces = pieces_of(PIECES)
    copier.start([], lambda: pieces, lambda: None, lambda error: told.put(gpu.side.idle))
    copier.wait()
    assert told.get_nowait(), 'told before wait has returned'
    assert len(gpu.ahead) == 3


def test_issued_pieces_have_arrived_when_start_fails(copier: Copier, gpu: Gpu) -> None:
    gpu.fail_at = 2
    pieces = pieces_of(PIECES)
    with pytest.raises(RuntimeError, match='cannot be issued'):
        copier.start(pieces, lambda: [], lambda: None, lambda error: None)
    assert gpu.training.idle
    assert copier.wait() == 0.0
