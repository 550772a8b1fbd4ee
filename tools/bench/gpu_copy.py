# SPDX-License-Identifier: Apache-2.0
"""Measures the capture path on a GPU: its bandwidth, and what it takes from compute.

    python -m tools.bench.gpu_copy --json gpu-copy.json

The state is that of a MoE stage: many experts, each with master weights, two moments and bf16
weights. It is captured as in training: a window file in a tmpfs, registered as pinned; copies on a
side stream while bf16 matrix products run; checksums on another thread. Compared are

  - the bandwidth with one large copy into a pinned buffer of torch, the limit of the machine,
  - the time of an iteration with the same iteration without capture,
  - how long small copies to the host, and launches from Python, take beside a capture and alone.

Exit status: 0 done, 1 what was captured is not the state, 2 there is no CUDA device.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import OperatorSlices, SlotLayout, operator_table
from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.pinning import pin
from moevement_ext.memory.window.expected import Expected
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotHeader, frame_bytes_bound
from moevement_ext.plan.byte_planner import (
    InfeasiblePlan,
    WindowPlan,
    hideable_budget,
    plan_stages,
)
from tools.bench.gpu_contention import Beside, Latency, SmallWork, alone, latencies
from tools.bench.gpu_stage import Compute, Settings, State, synchronize, timed
from tools.lab.arguments import Parser
from tools.lab.errors import LabError
from tools.lab.figures import Spread, write_json
from tools.lab.hardware import Hardware

GIB = 1 << 30
_NAME = 'bench'


class CopyReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    state_bytes: int
    tensors: int
    window: int
    slot_bytes: list[int]
    pin_s: float
    """To register the window file, once per run."""
    limit_gb_per_s: Spread
    """One large copy into a pinned buffer of torch."""
    idle_gb_per_s: float
    """Capture with nothing else running."""
    busy_gb_per_s: float
    """Capture while compute runs."""
    idle_over_limit: float
    busy_over_limit: float
    iteration_ms: Spread
    """Without capture."""
    captured_iteration_ms: Spread
    """With capture, checksums included."""
    exposed_ms: float
    """Difference of the medians."""
    exposed_ratio: float
    """Median with capture over median without."""
    stall_ms: Spread
    """The stream of training waited so long for a capture; by events of the device."""
    small_copy: Beside
    """Token counts to the host, alone and beside a capture."""
    launch: Beside
    """A small kernel from Python, alone and beside a capture."""
    seal_gb_per_s: float
    """Checksums, on the thread that seals; slower than a slot per iteration they would pile up."""
    identical: bool


class Window:
    """One window file, filled again and again by the capture path of training.

    Args:
        path: of the file.
        operators: what is captured.
        plan: of the window.
    """

    def __init__(self, path: Path, operators: dict[str, OperatorSlices], plan: WindowPlan) -> None:
        self.seal_s = 0.0
        self.errors: list[Exception] = []
        self.arrived = threading.Event()
        self._layouts = [SlotLayout(plan, slot, operators) for slot in range(plan.window)]
        frames = [frame_bytes_bound(self._header(slot)) for slot in range(plan.window)]
        sizes = [layout.payload_bytes for layout in self._layouts]
        self.file = WindowFile.create(path, window_capacity(zip(sizes, frames, strict=True)))

    @property
    def slot_bytes(self) -> list[int]:
        """Payload of each slot."""
        return [layout.payload_bytes for layout in self._layouts]

    def pin(self) -> float:
        """Register the pages, where there is a GPU; returns seconds."""
        began = time.perf_counter()
        if torch.cuda.is_available():
            pin(self.file)
        return time.perf_counter() - began

    def begin(self) -> None:
        """Forget all slots."""
        self.file.begin(WindowName(0, _NAME))

    def capture(self, slot: int, copier: Copier) -> None:
        """Begin to capture one slot."""
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
        """Whether slot i is whole and holds nothing but the i-th value."""
        headers = self.file.verify(Expected())
        return all(
            _filled_with(torch.from_numpy(self.file.payload(header.slot)), header, value)
            for header, value in zip(headers, values, strict=True)
        )

    def _failed(self, error: Exception) -> None:
        self.errors.append(error)
        self.arrived.set()

    def _seal(self, header: SlotHeader) -> None:
        self.arrived.set()
        began = time.perf_counter()
        self.file.seal_slot(header)
        self.seal_s += time.perf_counter() - began

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
        bool((_record(payload, item.offset, item.nbytes, item.dtype) == value).all())
        for item in header.records
    )


def _record(payload: torch.Tensor, offset: int, nbytes: int, dtype: str) -> torch.Tensor:
    return payload[offset : offset + nbytes].view(getattr(torch, dtype))


# ---- measuring


def copy_limit(device: torch.device, nbytes: int, copies: int) -> Spread:
    """GB/s of large copies into a pinned buffer of torch, one at a time."""
    cuda = device.type == 'cuda'
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda)

    def copy() -> None:
        target.copy_(source, non_blocking=cuda)

    copy()
    return Spread.of([nbytes / timed(device, copy) / 1e9 for _ in range(copies)])


def measure(device: torch.device, settings: Settings, directory: Path) -> CopyReport:
    """Do everything.

    Args:
        device: where the state lives; on the CPU the same code runs, only nothing is pinned.
        settings: what is measured.
        directory: in a tmpfs, for the window file.

    Raises:
        LabError: a capture failed.
        SparseCheckpointError: the window file cannot be reserved, planned or pinned.
    """
    limit = copy_limit(device, min(GIB, settings.state_bytes), settings.copies)
    state, compute = State(device, settings), Compute(device, settings)
    plain = [timed(device, compute) for _ in range(settings.repeats + 2)][2:]
    plan = _plan(state, limit.median * 1e9, statistics.median(plain))
    window = Window(directory / 'bench.window', state.operators, plan)
    pin_s = window.pin()
    _fill_idle(window, plan.window, device)  # warm-up
    idle_rate = _fill_idle(window, plan.window, device) / 1e9
    window.seal_s = 0.0
    seconds, stalls, rate = _fill_busy(
        window, plan.window, settings.repeats, state, compute, device
    )
    busy_rate, seal_s = rate / 1e9, window.seal_s
    identical = window.contents_are(range(plan.window))
    small = SmallWork(device)
    small_copy, launch = (
        _beside(window, plan.window, work, settings.small_calls, device)
        for work in (small.copy, small.launch)
    )
    without, with_it = statistics.median(plain), statistics.median(seconds)
    return CopyReport(
        hardware=Hardware.here(gpu=device.type == 'cuda'),
        state_bytes=state.nbytes,
        tensors=len(state.tensors),
        window=plan.window,
        slot_bytes=window.slot_bytes,
        pin_s=pin_s,
        limit_gb_per_s=limit,
        idle_gb_per_s=idle_rate,
        busy_gb_per_s=busy_rate,
        idle_over_limit=idle_rate / limit.median,
        busy_over_limit=busy_rate / limit.median,
        iteration_ms=Spread.of([1000 * value for value in plain]),
        captured_iteration_ms=Spread.of([1000 * value for value in seconds]),
        exposed_ms=1000 * (with_it - without),
        exposed_ratio=with_it / without,
        stall_ms=Spread.of([1000 * value for value in stalls]),
        small_copy=small_copy,
        launch=launch,
        seal_gb_per_s=settings.repeats * sum(window.slot_bytes) / seal_s / 1e9,
        identical=identical,
    )


def _plan(state: State, bytes_per_s: float, iteration_s: float) -> WindowPlan:
    """The shortest window that hides, as `--sparse-ckpt-window auto` chooses it."""
    sizes = {name: (item.full_bytes, item.light_bytes) for name, item in state.operators.items()}
    operators = operator_table(list(sizes), [sizes])
    budget = hideable_budget(bytes_per_s, iteration_s)
    return plan_stages([operators], window=None, budget=budget)[0]


def _fill_idle(window: Window, slots: int, device: torch.device) -> float:
    """One window with nothing else running; returns bytes per second."""
    with _copier(device, window) as copier:
        window.begin()
        for slot in range(slots):
            window.capture(slot, copier)
            copier.drain()
        return _measured(copier)


def _measured(copier: Copier) -> float:
    return copier.bytes_per_s() or 0.0  # nothing was measured if a capture failed, as is then said


def _fill_busy(
    window: Window, slots: int, repeats: int, state: State, compute: Compute, device: torch.device
) -> tuple[list[float], list[float], float]:
    """Windows with compute; returns seconds of each iteration and of its stall, and bytes/s.

    The state at a slot is the index of the slot. Not timed are the update, which is the same
    without capture, and checksums that outlast the iteration. Stalls are of all iterations but the
    last: with CUDA each is known in the next.
    """
    seconds, stalls = [], []
    with _copier(device, window) as copier:
        for slot in range(repeats * slots):
            state.set(slot % slots)
            if slot % slots == 0:
                window.begin()

            def iteration(slot: int = slot % slots) -> None:
                window.capture(slot, copier)
                compute()
                stalls.append(copier.wait())

            seconds.append(timed(device, iteration))
            state.set(-1)  # in stream order after the copies: what `wait` is for
            copier.drain()
        return seconds, stalls[1:] or stalls, _measured(copier)


def _beside(
    window: Window, slots: int, work: Callable[[], None], calls: int, device: torch.device
) -> Beside:
    """One window, while whose copies are under way `work` is called again and again."""
    by_itself = alone(work, calls)
    synchronize(device)
    beside: list[float] = []
    with _copier(device, window) as copier:
        window.begin()
        for slot in range(slots):
            window.capture(slot, copier)
            beside += latencies(work, lambda: not window.arrived.is_set())
            copier.drain()
            synchronize(device)
    return Beside(Latency.of(by_itself), Latency.of(beside))


@contextmanager
def _copier(device: torch.device, window: Window) -> Iterator[Copier]:
    """A copier with rates of its own; a failed capture is raised at the end."""
    copier = Copier(device)
    try:
        yield copier
        copier.drain()
    finally:
        copier.stop()
    if window.errors:
        raise LabError(f'a capture failed: {window.errors[0]}') from window.errors[0]


def print_report(report: CopyReport, console: Console) -> None:
    """For people."""
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    table = Table()
    for column in ('', 'figure', 'ratio'):
        table.add_column(column, justify='right' if column else 'left')
    gb, mean = 1e9, statistics.mean(report.slot_bytes)
    rows = (
        ('limit: one large pinned copy (GB/s)', report.limit_gb_per_s.text(1), '1'),
        ('capture, idle (GB/s)', f'{report.idle_gb_per_s:.1f}', f'{report.idle_over_limit:.3f}'),
        ('capture, busy (GB/s)', f'{report.busy_gb_per_s:.1f}', f'{report.busy_over_limit:.3f}'),
        ('checksums, busy (GB/s)', f'{report.seal_gb_per_s:.1f}', ''),
        ('iteration without capture (ms)', report.iteration_ms.text(1), '1'),
        (
            'iteration with capture (ms)',
            report.captured_iteration_ms.text(1),
            f'{report.exposed_ratio:.3f}',
        ),
        ('exposed per iteration (ms)', f'{report.exposed_ms:.2f}', ''),
        ('stall of the stream (ms)', report.stall_ms.text(2), ''),
        ('small copy alone, p99 and median (us)', report.small_copy.alone.text(), '1'),
        ('  beside a capture', report.small_copy.beside.text(), f'{report.small_copy.ratio:.1f}'),
        ('launch alone, p99 and median (us)', report.launch.alone.text(), '1'),
        ('  beside a capture', report.launch.beside.text(), f'{report.launch.ratio:.1f}'),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        f'State of {report.state_bytes / gb:.1f} GB in {report.tensors} tensors, window '
        f'{report.window}, slots of {mean / gb:.2f} GB on average; pinned in {report.pin_s:.1f} s.',
        highlight=False,
        soft_wrap=True,
    )
    if not report.identical:
        console.print('what was captured is NOT the state at its iteration', style='bold red')


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.gpu_copy',
        description=__doc__,
    )
    parser.add_argument(
        '--state-gib',
        type=float,
        help='size of the training state (default: half of the free memory of the card, at most a '
        'third of what --dir has free)',
    )
    parser.add_argument('--hidden', type=int, default=4096)
    parser.add_argument('--ffn', type=int, default=1536, help='of an expert (default: 1536)')
    parser.add_argument('--matmul', type=int, default=8192, help='size of the products')
    parser.add_argument(
        '--iteration-ms', type=float, default=300, help='of compute, about (default: 300)'
    )
    parser.add_argument('--repeats', type=int, default=5, help='windows captured (default: 5)')
    parser.add_argument('--dir', type=Path, default=Path('/dev/shm'), help='a tmpfs')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything here')
    args = parser.parse_args(argv)
    for flag in ('hidden', 'ffn', 'matmul', 'iteration_ms', 'repeats', 'state_gib'):
        value = getattr(args, flag)
        if value is not None and not value > 0:
            parser.error(f'--{flag.replace("_", "-")} {value}: must be above 0')
    if not args.dir.is_dir():
        parser.error(f'--dir {args.dir}: no such directory; give one in a tmpfs')
    return args


def _settings(args: argparse.Namespace) -> Settings:
    """State by the memory of the card; a window takes at most W - 1 light copies beside it."""
    if args.state_gib is not None:
        state_bytes = int(args.state_gib * GIB)
    else:
        card = torch.cuda.mem_get_info()[0] // 2
        state_bytes = min(card, shutil.disk_usage(args.dir).free // 3)
    return Settings(
        state_bytes=state_bytes,
        hidden=args.hidden,
        ffn=args.ffn,
        matmul=args.matmul,
        iteration_s=args.iteration_ms / 1000,
        repeats=args.repeats,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    console = Console()
    if not torch.cuda.is_available():
        print('bench_gpu_copy: no CUDA device; run this on a machine with a GPU', file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix='moevement-bench-', dir=args.dir) as directory:
            report = measure(torch.device('cuda'), _settings(args), Path(directory))
    except InfeasiblePlan as error:
        print(
            f'bench_gpu_copy: no window hides one expert: {error}; raise --iteration-ms or lower '
            '--ffn',
            file=sys.stderr,
        )
        return 2
    except (LabError, SparseCheckpointError) as error:
        print(f'bench_gpu_copy: {error}', file=sys.stderr)
        return 2
    print_report(report, console)
    if args.json:
        write_json(args.json, report)
    return 0 if report.identical else 1


if __name__ == '__main__':
    sys.exit(main())
