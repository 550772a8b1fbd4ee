# SPDX-License-Identifier: Apache-2.0
"""Capture from a GPU: a side stream, pinned windows, and the order of copies and updates."""

import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import PIECE_BYTES, _Copy, in_pieces
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.device import pin
from moevement_ext.memory.tensors import copy_all
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import WindowName
from tests.unit.memory.samples import PLAN, named, tmpfs_directory
from tests.unit.protect.training import DEADLINE_S, Training, W, assert_contents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]

ELEMENTS = 2**22
BUSY_CYCLES = 10**9
"""Keeps a stream busy for about half a second: longer than anything the host does meanwhile."""


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


@pytest.fixture
def device() -> torch.device:
    return torch.device('cuda', torch.cuda.current_device())


class Rig:
    """A copier, and targets in a pinned window file."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.copier = Copier(device)
        self.file = WindowFile.create(folder / 'test.window', 2**20 + 19 * 4 * ELEMENTS)
        pin(self.file)
        self.file.begin(named(0))
        self._slots = 0
        # What is loaded at its first use waits for all streams.
        self.occupy_side_stream(1)
        self.start([self.copy(0), self.copy(0)], [self.copy(0)])
        self.copier.wait()
        torch.cuda.synchronize()
        self.copier.drain()
        self.copier._known_stalls()  # and takes the stall of this capture

    def copy(self, value: float, elements: int = ELEMENTS) -> _Copy:
        """From the device into a slot of the file."""
        view = self.file.reserve_slot(self._slots, 4 * elements)
        self._slots += 1
        target = torch.from_numpy(view).view(torch.float32)
        return _Copy(target, torch.full((elements,), value, device=self.device))

    def start(
        self,
        stable: Sequence[_Copy],
        volatile: Sequence[_Copy] = (),
        seal: Callable[[], object] = lambda: None,
    ) -> None:
        pieces = in_pieces(stable)
        self.copier.start(
            in_pieces(volatile), lambda: pieces, lambda: _ignore(seal()), self.errors.put
        )

    def occupy_side_stream(self, cycles: int = BUSY_CYCLES) -> None:
        """Nothing queued on the copier's stream from now on is done soon."""
        with torch.cuda.stream(self.copier._stream):
            torch.cuda._sleep(cycles)

    def check(self) -> None:
        """Everything has arrived without an error."""
        self.copier.drain()
        assert self.errors.empty()


def _ignore(result: object) -> None:
    pass


@pytest.fixture
def rig(shm: Path, device: torch.device) -> Iterator[Rig]:
    rig = Rig(shm, device)
    yield rig
    rig.copier.stop()
    torch.cuda.synchronize()


def test_an_update_queued_right_after_wait_does_not_reach_the_copies(rig: Rig) -> None:
    copies = [rig.copy(value) for value in range(4)]  # two pieces, issued at once
    rig.occupy_side_stream()
    rig.start(copies)
    rig.copier.wait()
    assert not rig.copier._stream.query(), 'the copies have not even begun'
    for copy in copies:
        copy.source.fill_(-1)  # as the optimizer does
    torch.cuda.synchronize()
    for value, copy in enumerate(copies):
        assert (copy.target == value).all()
        assert (copy.source == -1).all()
    rig.check()


def test_copies_see_everything_queued_before_start(rig: Rig) -> None:
    stable, volatile = rig.copy(0), rig.copy(0)
    torch.cuda._sleep(BUSY_CYCLES)  # the last update has not been computed yet
    stable.source.fill_(3)
    volatile.source.fill_(4)
    rig.start([stable], [volatile])
    rig.copier.wait()
    torch.cuda.synchronize()
    assert (stable.target == 3).all()
    assert (volatile.target == 4).all()
    rig.check()


def test_volatile_slices_are_copied_before_forward_writes_them(rig: Rig) -> None:
    volatile, stable = rig.copy(4), rig.copy(5)
    rig.occupy_side_stream()  # volatile slices do not travel on it
    rig.start([stable], [volatile])
    volatile.source.fill_(-1)  # as forward does, without waiting for anything
    rig.copier.wait()
    torch.cuda.synchronize()
    assert (volatile.target == 4).all()
    rig.check()


def test_copies_do_not_delay_training_before_its_wait(rig: Rig) -> None:
    copy = rig.copy(1)
    product = torch.zeros(16, device=rig.device)
    product += 1  # loads the kernel, which may wait for all streams
    rig.occupy_side_stream()
    rig.start([copy])
    assert rig.copier._issued is not None
    rig.copier._issued.result(DEADLINE_S)
    product += 1  # as forward and backward do
    computed = torch.cuda.Event()
    computed.record()
    computed.synchronize()
    # With one connection kernels begin in the order of their launches, whatever their streams.
    one_connection = os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS') == '1'
    assert one_connection or not rig.copier._stream.query(), 'training waited for the copies'
    rig.copier.wait()
    updated = torch.cuda.Event()
    updated.record()
    assert one_connection or not updated.query(), 'the update is not ordered after the copies'
    updated.synchronize()
    assert rig.copier._stream.query()
    rig.check()


def test_sealing_comes_after_the_bytes_have_arrived(rig: Rig) -> None:
    copy, seen = rig.copy(7), []
    rig.occupy_side_stream()
    rig.start([copy], seal=lambda: seen.append(bool((copy.target == 7).all())))
    rig.check()
    assert seen == [True]
    assert 0 < rig.copier.bytes_per_s() < float('inf')


def test_a_late_seal_does_not_wait_for_a_later_capture(rig: Rig) -> None:
    """Checksums may take longer than an iteration; each capture has its own times."""
    copies, gate = [rig.copy(value) for value in range(3)], threading.Event()
    sealed: queue.Queue[int] = queue.Queue()
    rig.start(copies[:1], seal=lambda: gate.wait(DEADLINE_S))
    rig.copier.wait()
    rig.start(copies[1:2], seal=lambda: sealed.put(1))
    rig.copier.wait()
    rig.occupy_side_stream()
    rig.start(copies[2:], seal=lambda: sealed.put(2))
    assert rig.copier._issued is not None
    rig.copier._issued.result(DEADLINE_S)
    gate.set()
    assert sealed.get(timeout=DEADLINE_S) == 1
    assert not rig.copier._stream.query()
    rig.check()


def test_window_files_are_pinned(shm: Path, device: torch.device) -> None:
    file = WindowFile.create(shm / 'test.window', 2**21)
    assert not torch.from_numpy(file.array).is_pinned()
    pin(file)
    assert torch.from_numpy(file.array).is_pinned()
    assert torch.from_numpy(file.array[2**20 :]).is_pinned()
    other = WindowFile.create(shm / 'other.window', 2**21 + 64)
    pin(other)
    assert torch.from_numpy(other.array).is_pinned()


def test_a_failed_registration_is_refused_and_leaves_no_error(
    shm: Path, device: torch.device
) -> None:
    file = WindowFile.create(shm / 'test.window', 2**21)
    pin(file)
    with pytest.raises(HostMemoryError, match='CUDA cannot pin'):
        pin(file)  # the same pages twice
    torch.ones(1, device=device).add_(1)  # would raise the error that was left
    torch.cuda.synchronize(device)


def test_batches_of_any_content_arrive(shm: Path, device: torch.device) -> None:
    """Of several types, from device and host, to pinned memory, without waiting."""
    sources = [
        torch.randn(1001, device=device),
        torch.randn(77, device=device).to(torch.bfloat16),
        torch.tensor([3.0]),  # a step count of torch's Adam
        torch.randint(0, 9, (5,), device=device),
    ]
    targets = [torch.zeros_like(source, device='cpu').pin_memory() for source in sources]
    copy_all(targets, sources, non_blocking=True)
    torch.cuda.synchronize(device)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.cpu())


def test_no_more_than_two_pieces_are_queued_at_once(rig: Rig) -> None:
    """The others would hold up what training copies to the host itself."""
    pieces = [rig.copy(value, PIECE_BYTES // 4) for value in range(4)]
    rig.occupy_side_stream()
    rig.start(pieces)
    assert rig.copier._issued is not None
    time.sleep(0.1)  # the stream is occupied for longer
    assert not rig.copier._stream.query(), 'the stream was not occupied for long enough'
    assert not rig.copier._issued.done(), 'all pieces are queued'
    rig.copier.wait()
    torch.cuda.synchronize()
    for value, copy in enumerate(pieces):
        assert (copy.target == value).all()
    rig.check()


def test_small_copies_are_not_held_up_by_a_slot(rig: Rig) -> None:
    """As a dispatcher without drops copies its token counts, many times an iteration."""
    counts, stream = torch.ones(64, device=rig.device), torch.cuda.Stream(rig.device)

    def small_copy() -> float:
        began = time.perf_counter()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            counts.to('cpu', non_blocking=True)
            arrived = stream.record_event()
        arrived.synchronize()
        return time.perf_counter() - began

    for _ in range(50):
        small_copy()
    copies = [rig.copy(value, PIECE_BYTES // 4) for value in range(8)]
    arrived = threading.Event()
    rig.start(copies, seal=arrived.set)
    seconds = [small_copy()]
    while not arrived.is_set():
        seconds.append(small_copy())
    rig.copier.wait()
    rig.check()
    rate = rig.copier.bytes_per_s()
    assert rate is not None
    whole = 8 * PIECE_BYTES / rate
    assert statistics.median(seconds) < whole / 2, 'a small copy waits for about the whole slot'


def test_the_stall_of_training_is_measured_by_the_device(rig: Rig) -> None:
    copies = [rig.copy(value) for value in range(3)]
    rig.occupy_side_stream()
    began = time.perf_counter()
    rig.start(copies[:1])
    assert rig.copier.wait() == 0.0, 'the first stall is not known yet'
    torch.cuda.synchronize()
    longest = time.perf_counter() - began
    rig.copier.drain()
    rig.start(copies[1:2])
    torch.cuda._sleep(BUSY_CYCLES)  # forward and backward: this capture is hidden
    assert 0.05 < rig.copier.wait() <= longest
    torch.cuda.synchronize()
    rig.copier.drain()
    rig.start(copies[2:])
    assert rig.copier.wait() < 0.01, 'a hidden capture holds up nothing'
    rig.check()


def test_windows_of_a_gpu_hold_the_state_of_their_iterations(
    shm: Path, device: torch.device
) -> None:
    training = Training(shm, device=device, elements=ELEMENTS)
    for _ in range(4 * W):
        training.step()  # the host never waits for the device
    training.checkpointer.drain()
    for start in (0, 3, 6, 9):
        assert training.reported.get(timeout=DEADLINE_S) == WindowName(start, PLAN)
    assert training.checkpointer.statistics.failures == 0
    assert_contents(training, 9)
    training.stop()
