# SPDX-License-Identifier: Apache-2.0
"""Measures what protection costs per iteration, as ratios to plain Megatron on the same machine.

    python -m tools.bench.overhead --json overhead.json
    git worktree add ../before HEAD~1 && python -m tools.bench.overhead --against ../before

The ways to protect a run take turns over several rounds, so that a slow phase of the machine hits
all of them; ratios are taken within a round. The time of an iteration is that between the log lines
of two iterations and so has every stall of saving in it. All runs must end in the same bits. With
`--against` the sparse checkpointing of another checkout of this project takes turns as well.

Exit status: 0 done, 1 the final states differ, 2 a run failed.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from moevement_ext.events import WindowOnDisk
from tools.bench import model
from tools.bench.model import NODES
from tools.lab import precisions
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.cpu_clock import CpuClock
from tools.lab.digests import read_digest
from tools.lab.errors import LabError
from tools.lab.evidence import kind_of, read_events
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware
from tools.lab.job import Job, memory_directory
from tools.lab.launch import PROGRAM, Launch, Launcher
from tools.lab.models import dense_flags, prepare_text

_POLL_S = 0.25
PLAIN, SPARSE, AGAINST = 'plain', 'sparse', 'sparse-against'
DISK = 'sparse-disk'
DENSE_IN_MEMORY = 'dense-in-memory'
SYNC, ASYNC = 'torch-dist-sync', 'torch-dist-async'
TITLES = {
    PLAIN: 'plain Megatron',
    SPARSE: 'sparse checkpointing',
    AGAINST: 'sparse checkpointing of the other checkout',
    DISK: 'sparse checkpointing, windows also to disk',
    DENSE_IN_MEMORY: 'dense in host memory each time (window 1)',
    SYNC: 'torch_dist each time',
    ASYNC: 'torch_dist each time, asynchronous',
}


class Run(msgspec.Struct, frozen=True):
    """One run of one variant, warm-up dropped."""

    variant: str
    iteration_s: float
    """Median."""
    all_iterations_s: list[float]
    cpu_s: float
    """CPU seconds of an iteration, per rank."""
    exposed_ms: float | None
    """Mean exposed time of an iteration, from the log of sparse checkpointing on the last rank."""
    windows: list[int]
    """W of each iteration."""
    slot_bytes: list[int]
    """Bytes of each slot in the last window of the last rank."""
    digest: str
    on_disk: int = 0
    """Windows that all ranks had on disk."""


class Variant(msgspec.Struct, frozen=True):
    """One variant over all rounds."""

    title: str
    iteration_ms: Spread
    ratio: Spread
    """Iteration time over that of plain Megatron in the same round."""
    cpu_s: Spread
    cpu_ratio: Spread
    exposed_ms: Spread | None
    windows: list[int]
    """That were in force."""


class SlotBytes(msgspec.Struct, frozen=True):
    """What the last rank captures per iteration."""

    dense: int
    mean: float
    max: int
    mean_over_dense: float
    max_over_dense: float


class OverheadReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    ranks: int
    iterations: int
    warm_up: int
    window: str
    identical: bool
    variants: dict[str, Variant]
    slot_bytes: SlotBytes
    rounds: list[list[Run]]


class Bench(NamedTuple):
    """What is to be run."""

    data: Path
    output: Path
    ranks: int
    iterations: int
    warm_up: int
    window: str
    against: Path | None = None
    """Another checkout of this project."""
    precision: str = 'bf16'
    """One of `precisions.FLAGS`."""
    program_file: str = PROGRAM
    share_gpu: bool = False
    """All ranks on the first GPU, with Transformer Engine."""

    @property
    def variants(self) -> list[str]:
        """In the order of their turns."""
        return [name for name in TITLES if self.against is not None or name != AGAINST]

    def run(self, variant: str, round_number: int) -> Run:
        """Run one variant to its end.

        Raises:
            LabError: it failed.
        """
        folder = self.output / f'{round_number}-{variant}'
        digest = folder / 'digest.json'
        with (
            memory_directory() as memory,
            tempfile.TemporaryDirectory(prefix='checkpoints-', dir=self.output) as checkpoints,
        ):
            flags = self._training(digest)
            flags += self._protection(variant, memory, Path(checkpoints), folder / 'events')
            launch = Launch(
                folder,
                flags,
                NODES,
                self.ranks // NODES,
                share_gpu=self.share_gpu,
                program_file=self.program_file,
            )
            if variant == AGAINST and self.against is not None:
                launch = launch._replace(checkout=self.against)
            with Job(launch, Launcher.TORCHRUN) as job:
                clock = CpuClock(job)
                for log in job.follow('the end', _POLL_S):
                    clock.sample(log)
                log = job.read_log()
        if len(log.iterations) != self.iterations:
            raise LabError(f'{variant}: {len(log.iterations)} of {self.iterations} iterations')
        copied = kind_of(read_events(folder / 'events'), WindowOnDisk)
        on_disk = len({window.start for window in copied})
        if variant == DISK and not on_disk:
            raise LabError(f'{variant}: no window came to disk; take more --iterations')
        measured = log.iterations[self.warm_up - 1 :]
        seconds = log.wall_seconds(self.warm_up)
        slots = log.captured
        exposed = [slot.exposed_ms for slot in slots[self.warm_up :]]
        return Run(
            variant=variant,
            iteration_s=statistics.median(seconds),
            all_iterations_s=seconds,
            cpu_s=clock.seconds(measured[0].time, measured[-1].time) / len(seconds) / self.ranks,
            exposed_ms=statistics.mean(exposed) if exposed else None,
            windows=[slot.window for slot in slots],
            slot_bytes=[slot.nbytes for slot in slots[-slots[-1].window :]] if slots else [],
            digest=read_digest(digest).digest,
            on_disk=on_disk,
        )

    def _training(self, digest: Path) -> list[str]:
        engine = precisions.ENGINE if self.share_gpu else ()
        flags = model.training_flags(self.data, self.ranks, self.iterations, digest, self.precision)
        return [*flags, *engine]

    def _protection(self, variant: str, memory: Path, checkpoints: Path, events: Path) -> list[str]:
        match variant:
            case 'sparse' | 'sparse-against':
                return model.sparse_flags(memory, self.window, events)
            case 'sparse-disk':
                flags = model.sparse_flags(memory, self.window, events)
                return [*flags, *model.disk_flags(checkpoints)]
            case 'dense-in-memory':
                return model.sparse_flags(memory, '1', events)
            case 'torch-dist-sync' | 'torch-dist-async':
                return dense_flags(checkpoints, 1, asynchronous=variant == ASYNC)
        return []


def summarize(bench: Bench, hardware: Hardware, rounds: list[list[Run]]) -> OverheadReport:
    """Ratios within each round, then over the rounds."""
    by_round = [{run.variant: run for run in runs} for runs in rounds]
    digests = {run.digest for runs in rounds for run in runs}
    return OverheadReport(
        hardware=hardware,
        ranks=bench.ranks,
        iterations=bench.iterations,
        warm_up=bench.warm_up,
        window=bench.window,
        identical=len(digests) == 1,
        variants={name: _variant(name, by_round) for name in bench.variants},
        slot_bytes=_slot_bytes(by_round[-1]),
        rounds=rounds,
    )


def _variant(name: str, rounds: Sequence[dict[str, Run]]) -> Variant:
    runs = [runs[name] for runs in rounds]
    exposed = [run.exposed_ms for run in runs if run.exposed_ms is not None]
    return Variant(
        title=TITLES[name],
        iteration_ms=Spread.of([1000 * run.iteration_s for run in runs]),
        ratio=Spread.of([runs[name].iteration_s / runs[PLAIN].iteration_s for runs in rounds]),
        cpu_s=Spread.of([run.cpu_s for run in runs]),
        cpu_ratio=Spread.of([runs[name].cpu_s / runs[PLAIN].cpu_s for runs in rounds]),
        exposed_ms=Spread.of(exposed) if exposed else None,
        windows=sorted({window for run in runs for window in run.windows}),
    )


def _slot_bytes(runs: dict[str, Run]) -> SlotBytes:
    """A window of one slot holds everything in full: what a dense checkpoint takes."""
    dense = max(runs[DENSE_IN_MEMORY].slot_bytes)
    slots = runs[SPARSE].slot_bytes
    mean = statistics.mean(slots)
    return SlotBytes(dense, mean, max(slots), mean / dense, max(slots) / dense)


def print_report(report: OverheadReport, console: Console) -> None:
    """For people."""
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    table = Table()
    for column in ('', 'iteration (ms)', 'ratio', 'CPU s / rank', 'CPU ratio', 'exposed (ms)'):
        table.add_column(column, justify='right' if column else 'left')
    for name, variant in report.variants.items():
        windows = f', window {", ".join(map(str, variant.windows))}' if name == SPARSE else ''
        table.add_row(
            variant.title + windows,
            variant.iteration_ms.text(0),
            variant.ratio.text(3),
            variant.cpu_s.text(),
            variant.cpu_ratio.text(),
            variant.exposed_ms.text(1) if variant.exposed_ms else '-',
        )
    console.print(table)
    slots, mib = report.slot_bytes, 1 << 20
    console.print(
        f'Bytes per iteration on the last rank: dense {slots.dense / mib:.1f} MiB; slots '
        f'{slots.mean / mib:.1f} MiB on average ({slots.mean_over_dense:.0%}), '
        f'{slots.max / mib:.1f} MiB at most ({slots.max_over_dense:.0%}).\n'
        f'{report.ranks} ranks on {NODES} emulated nodes, {len(report.rounds)} rounds of '
        f'{report.iterations} iterations, the first {report.warm_up} dropped; per round the '
        'median, over rounds the median (and the range).',
        highlight=False,
        soft_wrap=True,
    )
    verdict = 'equal, bit for bit' if report.identical else '[bold red]DIFFERENT[/]'
    console.print(f'Final states of all runs: {verdict}.', highlight=False)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.overhead',
        description=__doc__,
    )
    parser.add_argument('--rounds', type=int, default=3, help='turns of all variants (default: 3)')
    parser.add_argument('--iterations', type=int, default=12, help='per run (default: 12)')
    parser.add_argument('--warm-up', type=int, default=4, help='to drop of each run (default: 4)')
    parser.add_argument('--ranks', type=int, choices=model.RANKS, default=2)
    parser.add_argument('--window', default='auto', help='of sparse checkpointing (default: auto)')
    parser.add_argument('--output', type=Path, default=Path('runs/bench'), help='folder for logs')
    parser.add_argument('--against', type=Path, metavar='DIR', help='another checkout to compare')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything here')
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f'--rounds {args.rounds}: must be at least 1')
    if args.warm_up < 1:
        parser.error(f'--warm-up {args.warm_up}: must be at least 1')
    if args.iterations < args.warm_up + 3:
        parser.error(f'--iterations {args.iterations}: must be at least --warm-up + 3')
    if args.window != 'auto' and not args.window.isdecimal():
        parser.error(f'--window {args.window}: must be a whole number or auto')
    if args.against is not None:
        args.against = args.against.resolve()
        if not (args.against / PROGRAM).is_file():
            parser.error(f'--against {args.against}: no checkout of this project ({PROGRAM})')
    return args


def measure(args: argparse.Namespace, console: Console) -> OverheadReport:
    """All rounds.

    Raises:
        LabError: a run failed.
    """
    hardware = Hardware.here(gpu=False)
    output = args.output.resolve() / 'overhead'
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    data = prepare_text(args.output.resolve() / 'data')
    bench = Bench(
        data, output, args.ranks, args.iterations, args.warm_up, args.window, args.against
    )
    rounds: list[list[Run]] = []
    for number in range(1, args.rounds + 1):
        rounds.append([])
        for name in bench.variants:
            run = bench.run(name, number)
            rounds[-1].append(run)
            console.print(
                f'round {number}: {1000 * run.iteration_s:5.0f} ms  {TITLES[name]}',
                highlight=False,
            )
    return summarize(bench, hardware, rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    return run_benchmark(
        'bench_overhead',
        lambda console: measure(args, console),
        print_report,
        args.json,
        passed=lambda report: report.identical,
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
