# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of protection per iteration, as ratios to plain Megatron on this machine.

    moevement bench overhead --json overhead.json
    git worktree add ../before HEAD~1 && moevement bench overhead --against ../before
    moevement bench overhead --precision all --stand-ins
    moevement bench overhead --precision all --rounds 1 --iterations 300 --stand-ins  # losses

The ways to protect a run take turns over several rounds, so that a slow phase of the machine
affects all of them; ratios are taken within a round. The time of an iteration is the time between
two log lines, so it includes every stall of a save. All runs must end in the same bits. With
`--against` the sparse checkpointing of another checkout of this project also takes turns.

With `--precision` configurations of the paper's Table 7 take turns with bf16 and with bf16 with
another seed, each unprotected and protected. Results: the cost of protection, the bytes of a
window, and the loss. These configurations need Transformer Engine, or stand-ins for it on a CPU.

Exit status: 0 done, 1 the final states differ, 2 a run failed.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from moevement_ext.events import Event, WindowCommitted, WindowOnDisk

from ..lab import models, precisions
from ..lab.arguments import Parser, at_least
from ..lab.benchmark import add_output_flags, exit_on_sigterm, prepare, run_benchmark
from ..lab.cpu_clock import CpuClock
from ..lab.errors import LabError
from ..lab.evidence import kind_of
from ..lab.hardware import Hardware
from ..lab.job import Job, memory_directory, train
from ..lab.launch import PROGRAM, Launch, Launcher
from ..lab.models import dense_flags, sparse_flags
from ..lab.run_log import RunLog
from ..lab.tables import say
from . import model
from .frame import Report, Way, over_rounds, print_ways, take_turns
from .model import NODES

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
_POLL_S = 0.25
BF16, ALL, AUTO = 'bf16', 'all', 'auto'
AGAIN = 'bf16, another seed'
FORMATS = (BF16, AGAIN, *(name for name in precisions.FLAGS if name != BF16))
_WINDOW_OF_FORMATS = '4'
# The loss is averaged over the last tenth of the iterations.
_SHARE = 10
_MIB = 1 << 20


class Run(msgspec.Struct, frozen=True):
    """One run of one variant, without its warm-up."""

    variant: str
    iteration_s: float
    """Median seconds of an iteration."""
    all_iterations_s: list[float]
    cpu_s: float
    """CPU seconds of an iteration, per rank."""
    helpers_s: float
    """CPU seconds of Python threads other than the training thread; 0 in plain Megatron."""
    exposed_ms: float | None
    """Mean exposed time of an iteration, as the last rank logs it."""
    windows: list[int]
    slot_bytes: list[int]
    """Bytes of each slot in the last window of the last rank."""
    digest: str
    on_disk: int = 0
    """Number of windows that all ranks had on disk."""
    loss: float | None = None
    """Mean over the last tenth of the iterations; None after a NaN."""


def final_loss(log: RunLog, iterations: int) -> float | None:
    """Mean over the last iterations; None if one of them has no loss in the log, which is a NaN."""
    count = max(iterations // _SHARE, 1)
    last = [item.loss for item in log.iterations if item.number > iterations - count]
    whole = len(last) == count and all(map(math.isfinite, last))
    return statistics.fmean(last) if whole else None


FIGURES: dict[str, Callable[[Run, Run], float | None]] = {
    'iteration_ms': lambda run, plain: 1000 * run.iteration_s,
    'ratio': lambda run, plain: run.iteration_s / plain.iteration_s,
    'cpu_s': lambda run, plain: run.cpu_s,
    'cpu_ratio': lambda run, plain: run.cpu_s / plain.cpu_s,
    'helpers': lambda run, plain: run.helpers_s / plain.cpu_s,
    'exposed_ms': lambda run, plain: run.exposed_ms,
    'loss': lambda run, plain: run.loss,
}
_COLUMNS = {
    'iteration_ms': ('iteration (ms)', 0),
    'ratio': ('ratio', 3),
    'cpu_s': ('CPU s / rank', 2),
    'cpu_ratio': ('CPU ratio', 2),
    'helpers': ('helpers', 3),
    'exposed_ms': ('exposed (ms)', 1),
    'loss': ('loss', 3),
}


def print_report(report: Report, console: Console) -> None:
    settings = report.settings
    engine = {None: '', True: ', stand-ins for Transformer Engine', False: ', Transformer Engine'}
    say(console, report.hardware.line() + engine[settings['stand_ins']])
    print_ways(report.ways.values(), _COLUMNS, console)
    say(
        console,
        f'{settings["ranks"]} ranks on 2 emulated nodes, {settings["rounds"]} rounds of '
        f'{settings["iterations"]} iterations, the first {settings["warm_up"]} dropped; per round '
        'the median, over rounds the median (and the range). Slots are those of the last window of '
        'the last rank, in MiB; one slot is what a dense checkpoint takes. Helpers: CPU time of '
        "Python threads other than the training thread, over all of plain Megatron's. "
        'Losses: mean of the last tenth of the iterations, - after a NaN.',
    )
    verdict = f'DIFFERENT in {", ".join(report.different)}' if report.different else 'equal'
    say(console, f'Final states of all runs of a precision, bit for bit: {verdict}.')


def title_of(run: Run) -> str:
    """Title with windows and slots, as far as a run has them."""
    windows = sorted(set(run.windows))
    if not windows:
        return TITLES[run.variant]
    slots = ' '.join(f'{nbytes / _MIB:.1f}' for nbytes in run.slot_bytes)
    return f'{TITLES[run.variant]}, window {", ".join(map(str, windows))}, slots {slots}'


class Bench(NamedTuple):
    """Parameters of the benchmark."""

    data: Path
    output: Path
    ranks: int
    iterations: int
    warm_up: int
    window: str
    against: Path | None = None
    precision: str = BF16
    """One of `FORMATS`, or of `precisions.NATIVE`."""
    stand_ins: bool | None = None
    """False: all ranks use the first GPU and Transformer Engine. None: only native precision."""
    only: Sequence[str] = tuple(TITLES)

    @property
    def variants(self) -> list[str]:
        """Names of the runs that take turns; plain Megatron is the first."""
        if self.stand_ins is not None:
            return [PLAIN, SPARSE]
        beside = (name for name in self.only if self.against is not None or name != AGAINST)
        return [PLAIN, *(name for name in beside if name != PLAIN)]

    def run(self, variant: str, round_number: int) -> Run:
        folder = self.output / f'{round_number}-{variant}'
        clock = CpuClock()

        def sample(job: Job) -> None:
            for log in job.follow('the end', _POLL_S):
                clock.sample(job, log)

        with (
            memory_directory() as memory,
            tempfile.TemporaryDirectory(
                prefix='checkpoints-', dir=self.output.parent
            ) as checkpoints,
        ):
            flags = [*self.training_flags(), *self.protection(variant, memory, Path(checkpoints))]
            if '--sparse-ckpt' in flags:
                flags += ['--sparse-ckpt-events', str(folder / 'events')]
            found = train(self._launch(variant, folder, flags), sample, Launcher.TORCHRUN)
        log = found.log
        if len(log.iterations) != self.iterations and self.stand_ins is None:
            raise LabError(f'{variant}: {len(log.iterations)} of {self.iterations} iterations')
        on_disk = len({window.start for window in kind_of(found.events, WindowOnDisk)})
        if variant == DISK and not on_disk:
            raise LabError(f'{variant}: no window was copied to disk; take more --iterations')
        measured = log.iterations[self.warm_up - 1 :]
        seconds = log.wall_seconds(self.warm_up)
        if not seconds:
            raise LabError(f'{variant}: no iteration after the first {self.warm_up} has a loss')
        slots = log.captured
        exposed = [slot.exposed_ms for slot in slots[self.warm_up :]]
        span = measured[0].time, measured[-1].time
        iterations = len(seconds) * self.ranks
        return Run(
            variant=variant,
            iteration_s=statistics.median(seconds),
            all_iterations_s=seconds,
            cpu_s=clock.seconds(*span) / iterations,
            helpers_s=helpers_s(found.events, self.warm_up),
            exposed_ms=statistics.mean(exposed) if exposed else None,
            windows=[slot.window for slot in slots],
            slot_bytes=[slot.nbytes for slot in slots[-slots[-1].window :]] if slots else [],
            digest=found.state.digest,
            on_disk=on_disk,
            loss=final_loss(log, self.iterations),
        )

    def _launch(self, variant: str, folder: Path, flags: Sequence[str]) -> Launch:
        launch = Launch(folder, flags, NODES, self.ranks // NODES)
        if self.stand_ins is not None:
            program = precisions.program(self.stand_ins)
            launch = launch._replace(program_file=program, share_gpu=not self.stand_ins)
        if variant == AGAINST and self.against is not None:
            launch = launch._replace(checkout=self.against)
        return launch

    def training_flags(self) -> list[str]:
        """Flags of plain Megatron; the last value of a flag counts."""
        precision = BF16 if self.precision == AGAIN else self.precision
        flags = model.training_flags(self.data, self.ranks, self.iterations, precision)
        flags += ['--seed', '4321'] if self.precision == AGAIN else []
        return [*flags, *(precisions.ENGINE if self.stand_ins is False else ())]

    def protection(self, variant: str, memory: Path, checkpoints: Path) -> list[str]:
        """Flags of a way to protect a run, except the folder of events."""
        disk = ['--sparse-ckpt-disk', str(checkpoints), '--sparse-ckpt-disk-every', '1']
        sparse = sparse_flags(memory, model.RUN_ID, self.window)
        flags = {
            SPARSE: sparse,
            AGAINST: sparse,
            # The next window is copied as soon as all ranks have copied the one before.
            DISK: [*sparse, *disk],
            DENSE_IN_MEMORY: sparse_flags(memory, model.RUN_ID, 1),
            SYNC: dense_flags(checkpoints, 1, asynchronous=False),
            ASYNC: dense_flags(checkpoints, 1, asynchronous=True),
        }
        return flags.get(variant, [])


def helpers_s(events: Iterable[Event], warm_up: int) -> float:
    """CPU seconds of helper threads per rank and iteration, between commits after the warm-up."""
    by_rank: dict[int, list[WindowCommitted]] = defaultdict(list)
    for event in kind_of(events, WindowCommitted):
        if event.start >= warm_up:
            by_rank[event.rank].append(event)
    spans = [(of_rank[0], of_rank[-1]) for of_rank in by_rank.values() if len(of_rank) > 1]
    seconds = sum(last.helpers_s - first.helpers_s for first, last in spans)
    iterations = sum(_end(last) - _end(first) for first, last in spans)
    return seconds / iterations if iterations else 0.0


def _end(committed: WindowCommitted) -> int:
    return committed.start + len(committed.slots)


def summarize(bench: Bench, hardware: Hardware, rounds: dict[str, list[dict[str, Run]]]) -> Report:
    """Report on rounds by precision; all runs of a precision must end in the same bits."""
    ways: dict[str, Way] = {}
    for precision, of_precision in rounds.items():
        titles = {name: f'{precision}: {title_of(run)}' for name, run in of_precision[-1].items()}
        found = over_rounds(of_precision, titles, FIGURES)
        ways |= {f'{precision}/{name}': way for name, way in found.items()}
    different = [
        precision
        for precision, of_precision in rounds.items()
        if len({run.digest for runs in of_precision for run in runs.values()}) > 1
    ]
    settings = {
        'ranks': bench.ranks,
        'rounds': len(next(iter(rounds.values()))),
        'iterations': bench.iterations,
        'warm_up': bench.warm_up,
        'window': bench.window,
        'stand_ins': bench.stand_ins,
    }
    return Report(hardware, settings, ways, different, rounds)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement bench overhead', description=__doc__)
    add = parser.add_argument
    add('--rounds', type=at_least(1), default=3, help='rounds over all variants (default: 3)')
    add('--iterations', type=int, default=12, help='iterations per run (default: 12)')
    add('--warm-up', type=at_least(1), default=4, help='iterations to drop (default: 4)')
    add('--ranks', type=int, choices=model.RANKS, default=2)
    add('--only', choices=TITLES, nargs='+', default=list(TITLES),
        help='ways to protect a run, besides plain Megatron (default: all)')  # fmt: skip
    add('--window', default=AUTO, help='iterations, or auto (default: auto; 4 with --precision)')
    add_output_flags(parser)
    add('--against', type=Path, metavar='DIR', help='another checkout to compare')
    add('--precision', metavar='NAMES', help=f'measure these, {ALL} or some of '
        f'{",".join(name for name in precisions.FLAGS if name != BF16)}, besides bf16')  # fmt: skip
    add('--stand-ins', action='store_true', help='on a CPU, with stand-ins for Transformer Engine '
        'of the tests (default: on the first GPU, with Transformer Engine)')  # fmt: skip
    args = parser.parse_args(argv)
    if args.iterations < args.warm_up + 3:
        parser.error(f'--iterations {args.iterations}: must be at least --warm-up + 3')
    if args.against is not None:
        args.against = args.against.resolve()
        if not (args.against / PROGRAM).is_file():
            parser.error(f'--against {args.against}: no checkout of this project ({PROGRAM})')
    _check_precision(parser, args)
    return args


def _check_precision(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Convert names to those of `FORMATS`, in place."""
    if args.precision is None:
        if args.stand_ins:
            parser.error('--stand-ins is for --precision: give both')
        return
    if args.against is not None:
        parser.error('--against is not measured with --precision: leave one out')
    names = list(FORMATS) if args.precision == ALL else args.precision.split(',')
    if not set(names) <= set(FORMATS):
        parser.error(f'--precision {args.precision}: must be {ALL} or some of {",".join(FORMATS)}')
    args.precision = [BF16, *(name for name in names if name != BF16)]
    args.window = _WINDOW_OF_FORMATS if args.window == AUTO else args.window
    if args.iterations < args.warm_up + int(args.window):
        parser.error(f'--iterations {args.iterations}: must be at least --warm-up + --window')
    try:
        precisions.program(args.stand_ins)
    except ValueError as error:
        parser.error(str(error))


def measure(args: argparse.Namespace, console: Console) -> Report:
    stand_ins = args.stand_ins if args.precision else None
    hardware = Hardware.here(gpu=stand_ins is False)
    output, data = prepare(args, 'overhead')
    bench = Bench(
        data, output, args.ranks, args.iterations, args.warm_up, args.window, args.against,
        stand_ins=stand_ins, only=args.only,
    )  # fmt: skip
    measured = args.precision or [models.native_precision()]
    titles = {
        f'{name}/{way}': f'{name}: {TITLES[way]}' for name in measured for way in bench.variants
    }

    def run(way: str, number: int) -> Run:
        name, _, variant = way.rpartition('/')
        (folder := output / name.replace(', ', '-')).mkdir(parents=True, exist_ok=True)
        return bench._replace(precision=name, output=folder).run(variant, number)

    found = take_turns(args.rounds, titles, run, lambda run: run.iteration_s, console)
    rounds = {
        name: [{way: one[f'{name}/{way}'] for way in bench.variants} for one in found]
        for name in measured
    }
    return summarize(bench, hardware, rounds)


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    args = parse_arguments(argv)
    return run_benchmark('bench_overhead', args, measure, print_report)


if __name__ == '__main__':
    sys.exit(main())
