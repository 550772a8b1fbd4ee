# SPDX-License-Identifier: Apache-2.0
"""Measures the capture path of one GPU, and its effect on other work, with one connection count.

    python -m tests.gpu.jobs.copy_probe <directory in a tmpfs> gpu|cpu <file for figures>

The state is that of a MoE stage: many experts, each with master weights, two moments and bf16
weights. Captures work as in training: into a window file in a tmpfs, registered as pinned; copies
on a side stream while bf16 matrix products run; checksums on another thread. On the CPU the same
code runs without pinned memory and without overlap. The probe needs its own process: CUDA reads the
number of connections (`CUDA_DEVICE_MAX_CONNECTIONS`) at start.

Exit status: 0 done, 1 a capture failed.
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import OperatorSlices, SlotLayout, TensorSlice, operator_table
from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.device import pin
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected, window_capacity
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotHeader, frame_bytes_bound
from moevement_ext.plan.byte_planner import (
    InfeasiblePlan,
    WindowPlan,
    balanced,
    fewest_slots,
    hideable_budget,
)
from tools.lab.figures import write_json
from tools.lab.programs import LabError

_NAME = 'probe'
_GIB = 1 << 30
_FULL_PARTS = ('master', 'exp_avg', 'exp_avg_sq')
_BYTES_PER_ELEMENT = 14  # three of float32, one of bfloat16


class Sizes(NamedTuple):
    state_bytes: int
    """Approximate size of the training state."""
    hidden: int
    """Matrices of an expert have shape (ffn, hidden)."""
    ffn: int
    matmul: int
    """Size of the square matrices whose products are the compute load."""
    iteration_s: float
    """Approximate compute time of an iteration."""
    windows: int
    """Number of windows with capture; as many iterations run without."""
    small_calls: int
    """Number of small copies on an idle device."""
    window: int | None = None
    """W; None: the shortest window that hides copies, as `--sparse-ckpt-window auto` chooses."""


ON_GPU = Sizes(10 * _GIB, 4096, 1536, 8192, 0.3, windows=3, small_calls=2000)
ON_CPU = Sizes(1 << 23, 64, 32, 64, 0.01, windows=2, small_calls=20, window=2)


class Stage:
    """Training state of at least two experts on one device, and compute of a given duration."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self._device = device
        self.tensors: list[torch.Tensor] = []
        per_expert = 3 * sizes.ffn * sizes.hidden * _BYTES_PER_ELEMENT  # gate, up, down projection
        count = max(2, sizes.state_bytes // per_expert)
        self.operators = {
            name: self._expert(name, sizes.ffn * sizes.hidden)
            for name in (f'expert.{index}' for index in range(count))
        }
        square = torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=torch.bfloat16)
        self._factor, self._product = square, torch.empty_like(square)
        self._products = 1
        self.compute()
        once = statistics.median(timed(device, self.compute) for _ in range(5))
        self._products = max(1, round(sizes.iteration_s / once))

    def _expert(self, name: str, elements: int) -> OperatorSlices:
        def part(matrix: str, kind: str, dtype: torch.dtype) -> TensorSlice:
            flat = torch.full((elements,), 1.0, dtype=dtype, device=self._device)
            self.tensors.append(flat)
            return TensorSlice(name, f'{name}.{matrix}', kind, 0, flat.numel(), flat)

        matrices = ('gate', 'up', 'down')
        full = [part(matrix, kind, torch.float32) for matrix in matrices for kind in _FULL_PARTS]
        weights = [part(matrix, 'weight', torch.bfloat16) for matrix in matrices]
        return OperatorSlices(tuple(full), tuple(weights))

    def set(self, value: int) -> None:
        """Overwrite the whole state, as an update does; small integers are exact in bfloat16."""
        torch._foreach_zero_(self.tensors)
        torch._foreach_add_(self.tensors, float(value))

    def compute(self) -> None:
        for _ in range(self._products):
            torch.mm(self._factor, self._factor, out=self._product)

    def plan(self, bytes_per_s: float, iteration_s: float, window: int | None) -> WindowPlan:
        """Plan a window of `window` slots; None: the shortest window that hides its copies."""
        sizes = {
            name: (item.full_bytes, item.weight_bytes) for name, item in self.operators.items()
        }
        table = operator_table(list(sizes), [sizes])
        budget = hideable_budget(bytes_per_s, iteration_s)
        return fewest_slots(table, budget) if window is None else balanced(table, window)


class Window:
    """One window file, filled repeatedly by the capture path of training."""

    def __init__(self, path: Path, operators: dict[str, OperatorSlices], plan: WindowPlan) -> None:
        self.slots = plan.window
        self.arrived = threading.Event()
        self._errors: list[Exception] = []
        self._layouts = [SlotLayout(plan, slot, operators) for slot in range(plan.window)]
        frames = [frame_bytes_bound(self._header(slot)) for slot in range(plan.window)]
        sizes = [layout.payload_bytes for layout in self._layouts]
        self.file = WindowFile.create(path, window_capacity(zip(sizes, frames, strict=True)))

    def begin(self) -> None:
        self.file.begin(WindowName(0, _NAME))

    def capture(self, slot: int, copier: Copier) -> None:
        layout, header = self._layouts[slot], self._header(slot)
        payload = self.file.reserve_slot(slot, layout.payload_bytes)
        self.arrived.clear()
        copier.start(
            layout.copies(payload, volatile=True),
            lambda: layout.copies(payload, volatile=False),
            lambda: self._seal(header),
            self._failed,
        )

    def contents_are(self, values: Sequence[int]) -> bool:
        """True if slot i is complete and contains only the i-th value."""
        headers = self.file.verify(Expected())
        return all(
            _filled_with(torch.from_numpy(self.file.payload(header.slot)), header, value)
            for header, value in zip(headers, values, strict=True)
        )

    @contextmanager
    def copier(self, device: torch.device) -> Iterator[Copier]:
        """A copier with its own measured rates; raises the error of a failed capture at the end."""
        copier = Copier(device)
        try:
            yield copier
            copier.drain()
        finally:
            copier.stop()
        if self._errors:
            raise LabError(f'a capture failed: {self._errors[0]}') from self._errors[0]

    def _failed(self, error: Exception) -> None:
        self._errors.append(error)
        self.arrived.set()

    def _seal(self, header: SlotHeader) -> None:
        self.arrived.set()
        self.file.seal_slot(header)

    def _header(self, slot: int) -> SlotHeader:
        layout = self._layouts[slot]
        return SlotHeader(
            version=FORMAT_VERSION,
            run=_NAME,
            topology=_NAME,
            owner=0,
            start=0,
            window=len(self._layouts),
            slot=slot,
            iteration=slot,
            plan=_NAME,
            payload_bytes=layout.payload_bytes,
            records=layout.records,
        )


def _filled_with(payload: torch.Tensor, header: SlotHeader, value: int) -> bool:
    return all(
        bool((payload[at.offset :][: at.nbytes].view(getattr(torch, at.dtype)) == value).all())
        for at in header.records
    )


# ---- measurements


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds from an idle device until `work` and all work that it queued are done."""
    _synchronize(device)
    began = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, target: torch.Tensor) -> float:
    """GB/s of one large copy to host memory, the best of five; a first copy is the warm-up."""
    source = torch.ones(target.numel(), dtype=torch.uint8, device=device)
    times = [timed(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(6)]
    return target.numel() / min(times[1:]) / 1e9


def busy(device: torch.device, stage: Stage, window: Window, windows: int) -> dict[str, Any]:
    """Captures during compute: bandwidth, iteration time, and whether contents are right.

    The state at each slot is the slot's index. Not timed: the update, which is equal without
    capture, and checksums that outlast the iteration.
    """
    seconds = []
    with window.copier(device) as copier:
        for slot in range(windows * window.slots):
            stage.set(slot % window.slots)
            if slot % window.slots == 0:
                window.begin()

            def iteration(slot: int = slot % window.slots) -> None:
                window.capture(slot, copier)
                stage.compute()
                copier.wait()

            seconds.append(timed(device, iteration))
            stage.set(-1)  # in stream order after the copies, which `wait` guarantees
            copier.drain()
        rate = copier.bytes_per_s() or 0.0  # a failed capture has no rate, and raises later
    return {
        'captured_iteration_ms': 1000 * statistics.median(seconds),
        'busy_gb_s': rate / 1e9,
        'identical': window.contents_are(range(window.slots)),
    }


def small_copy(device: torch.device) -> Callable[[], None]:
    """Copy token counts to the host on a separate stream, as a dispatcher without drops does."""
    counts = torch.ones(64, device=device)
    stream = torch.cuda.Stream(device) if device.type == 'cuda' else None

    def copy() -> None:
        if stream is None:
            counts.clone()
            return
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            counts.to('cpu', non_blocking=True)
            arrived = stream.record_event()
        arrived.synchronize()

    return copy


def beside(
    device: torch.device, window: Window, work: Callable[[], None], calls: int
) -> dict[str, dict[str, float]]:
    """Latencies of `work` on an idle device, and during the copies of a window.

    The copies of a slot last until they have arrived.
    """
    left = iter(range(calls - 1))
    alone = _latencies(work, lambda: next(left, None) is not None)
    _synchronize(device)
    meanwhile: list[float] = []
    with window.copier(device) as copier:
        window.begin()
        for slot in range(window.slots):
            window.capture(slot, copier)
            meanwhile += _latencies(work, lambda: not window.arrived.is_set())
            copier.drain()
            _synchronize(device)
    return {'alone': percentiles(alone), 'beside': percentiles(meanwhile)}


def _latencies(work: Callable[[], None], goes_on: Callable[[], bool]) -> list[float]:
    """Seconds of each call, at least one, while `goes_on`."""
    seconds: list[float] = []
    while not seconds or goes_on():
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles of at least one call, in milliseconds."""
    ordered = sorted(1000 * value for value in seconds)
    last = len(ordered) - 1
    figures = {'p50_ms': ordered[last // 2], 'p99_ms': ordered[round(0.99 * last)]}
    return {'calls': len(ordered), **figures, 'max_ms': ordered[-1]}


def measure(device: torch.device, folder: Path, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Measure all figures, one by one.

    Raises:
        LabError: a capture failed.
        InfeasiblePlan: no window hides one expert.
        SparseCheckpointError: the window file cannot be reserved or pinned.
    """
    gpu = device.type == 'cuda'
    large = min(_GIB, sizes.state_bytes)
    pinned = bandwidth(device, torch.empty(large, dtype=torch.uint8, pin_memory=gpu))
    stage = Stage(device, sizes)
    plain = [timed(device, stage.compute) for _ in range(sizes.windows + 2)][2:]
    iteration_s = statistics.median(plain)
    plan = stage.plan(pinned * 1e9, iteration_s, sizes.window)
    window = Window(folder / 'probe.window', stage.operators, plan)
    nbytes = window.file.array.size
    began = time.perf_counter()
    if gpu:
        pin(window.file)
    pin_s = time.perf_counter() - began
    yield {
        'pinned_gb_s': pinned,
        'registered_gb_s': bandwidth(device, torch.from_numpy(window.file.array[:large])),
        'register_gib_s': nbytes / _GIB / pin_s,
        'window': plan.window,
        'iteration_ms': 1000 * iteration_s,
    }
    busy(device, stage, window, 1)  # warm-up
    found = busy(device, stage, window, sizes.windows)
    yield {**found, 'busy_over_limit': found['busy_gb_s'] / pinned}
    work = small_copy(device)
    yield {'small_copy': beside(device, window, work, sizes.small_calls)}


def main(argv: Sequence[str]) -> int:
    """Measure, and write all figures so far after each."""
    memory, device, target = argv
    sizes = ON_GPU if device == 'gpu' else ON_CPU
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix='moevement-probe-', dir=memory) as folder:
        try:
            place = torch.device('cuda' if device == 'gpu' else 'cpu')
            for more in measure(place, Path(folder), sizes):
                figures |= more
                write_json(Path(target), figures)
        except (InfeasiblePlan, LabError, SparseCheckpointError) as error:
            print(f'copy_probe: {error}', file=sys.stderr)
            return 1
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
