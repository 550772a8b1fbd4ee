# SPDX-License-Identifier: Apache-2.0
"""Measures the benefit of each part of the method with equal faults (the paper's figure 13).

    python -m tools.bench.ablation --json ablation.json

A GPT on 4 pipeline stages, each on its own emulated node, with routers without load balancing, so
that few experts have most tokens. The same workers are killed after the same iterations with four
ways to recover, each with all parts of the ways before it:

  sparse windows   all stages roll back in place and replay; frozen operators save nothing
  + frozen         a replay skips the weight gradients of frozen operators
  + popularity     experts with the most tokens are captured last, so they are frozen longest
  + localized      only the lost stage rolls back, and replays from the logs of its neighbours

ETTR is the time of the iterations in plain Megatron divided by the time of the job with faults;
the prediction is the simulator's closed formula with measurements of this run: iteration,
restart, bytes, token shares, failures. Processes start as hot spares.

Exit status: 0 done, 1 a final state differs from plain Megatron's, 2 a run failed.
"""

import argparse
import itertools
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from moevement_ext.config import FIXED, GLOBAL, LOCALIZED, OFF, ON, POPULARITY
from moevement_ext.events import Recovered
from tools.bench import model
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.errors import LabError
from tools.lab.evidence import kind_of
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware
from tools.lab.job import Job, memory_directory
from tools.lab.launch import Launch
from tools.lab.models import prepare_text
from tools.lab.run_log import Iteration
from tools.lab.trained import Trained, train
from tools.simulate import run_profile
from tools.simulate.fields import FieldError
from tools.simulate.profile import ProfileError
from tools.simulate.systems import Options, build

STAGES = 4
_SKEWED = '--moe-router-load-balancing-type none --moe-aux-loss-coeff 0'.split()
_WARM_UP = 3
# Part of an iteration saved with all operators frozen (docs/measurements/frozen.json).
_FROZEN_SAVING = 0.28


class Parts(NamedTuple):
    """The parts of the method in a way to recover."""

    title: str
    freeze: str
    order: str
    recovery: str

    def flags(self) -> list[str]:
        """Flags of sparse checkpointing."""
        return [
            *('--sparse-ckpt-freeze', self.freeze, '--sparse-ckpt-order', self.order),
            *('--sparse-ckpt-recovery', self.recovery),
        ]


WAYS = (
    Parts('sparse windows', OFF, FIXED, GLOBAL),
    Parts('+ frozen', ON, FIXED, GLOBAL),
    Parts('+ popularity', ON, POPULARITY, GLOBAL),
    Parts('+ localized', ON, POPULARITY, LOCALIZED),
)


class Measured(msgspec.Struct, frozen=True):
    """Results of one job with faults."""

    ettr: float
    predicted: float | None
    """None: the events are not sufficient."""
    recovery_s: float
    """Median over the faults; seconds until the last rank has recovered."""
    phases: dict[str, float]
    """Seconds on the rank with the most repeated iterations, medians over the faults."""
    again: float
    """Mean number of repeated stage-iterations per fault."""
    different: list[str]
    """Kinds of state that differ from plain Megatron."""


class WayResult(msgspec.Struct, frozen=True):
    """One way, over all rounds."""

    title: str
    ettr: Spread
    predicted: Spread | None
    recovery_s: Spread
    ratio: Spread
    """`recovery_s` divided by that of the first way in the same round."""
    phases: dict[str, float]
    again: float
    different: list[str]


class AblationReport(msgspec.Struct, frozen=True):
    """Results of all ways."""

    hardware: Hardware
    stages: int
    window: int
    iterations: int
    faults: list[tuple[int, int]]
    """Pairs of iteration and rank of the kills."""
    ways: list[WayResult]

    @property
    def exact(self) -> bool:
        """True if all final states equal that of plain Megatron."""
        return not any(way.different for way in self.ways)


class Bench(NamedTuple):
    """Parameters of the benchmark."""

    data: Path
    output: Path
    window: int
    faults: int

    @property
    def trace(self) -> list[tuple[int, int]]:
        """Pairs of iteration and rank of the kills; all earlier windows are complete."""
        apart = 2 * self.window + 2
        return [(apart * (1 + n), (1 + 2 * n) % STAGES) for n in range(self.faults)]

    @property
    def iterations(self) -> int:
        """Iterations of each job: one more window after the last fault."""
        return self.trace[-1][0] + self.window

    def plain(self) -> Trained:
        """Run plain Megatron without a fault."""
        return train(Launch(self.output / 'plain', self._flags(), STAGES, 1))

    def hurt(self, number: int, way: Parts, plain: Trained) -> Measured:
        """Run the job with all faults of the trace.

        Raises:
            LabError: the job failed, or recovered in another way.
        """
        folder = self.output / f'{number}-{WAYS.index(way)}'
        with memory_directory() as memory:
            flags = [*self._flags(), *model.sparse_flags(memory, str(self.window)), *way.flags()]
            flags += ['--sparse-ckpt-events', str(folder / 'events')]
            launch = Launch(folder, flags, STAGES, 1, len(self.trace), spares=1)
            killed: list[float] = []

            def strike(job: Job) -> float:
                for after, victim in self.trace:
                    killed.append(job.kill_after(after, [victim]))
                return killed[-1]

            found = train(launch, strike)
        return measured(found, killed, plain, way, self.window, folder / 'events')

    def _flags(self) -> list[str]:
        layout = ['--pipeline-model-parallel-size', str(STAGES)]
        layout += ['--expert-model-parallel-size', '1', *_SKEWED]
        return model.training_flags(self.data, 2, self.iterations) + layout


def measured(
    found: Trained,
    killed: Sequence[float],
    plain: Trained,
    way: Parts,
    window: int,
    events: Path,
) -> Measured:
    """Results of a job with faults.

    Args:
        found: the job.
        killed: times of the faults (seconds since the epoch).
        plain: the job without windows and faults.
        way: the way to recover.
        window: W.
        events: folder of the events.

    Raises:
        LabError: the job did not recover from a fault.
    """
    ends = [*killed[1:], float('inf')]
    recoveries = [
        [event for event in kind_of(found.events, Recovered) if since < event.time < until]
        for since, until in zip(killed, ends, strict=True)
    ]
    if not all(recoveries):
        raise LabError(f'{way.title}: not every fault was recovered from; see {events.parent}')
    slowest = [max(back, key=lambda one: (one.replayed, one.time)) for back in recoveries]
    seconds = [
        max(one.time for one in back) - since
        for back, since in zip(recoveries, killed, strict=True)
    ]
    names = list(dict.fromkeys(name for one in slowest for name in one.seconds))
    wall_s = _span_s(found.log.iterations)
    mtbf_s = wall_s / len(killed)
    return Measured(
        ettr=_useful_s(found.log.iterations, plain) / wall_s,
        predicted=predicted(events, way, window, mtbf_s),
        recovery_s=statistics.median(seconds),
        phases={
            name: statistics.median(one.seconds.get(name, 0.0) for one in slowest) for name in names
        },
        again=sum(one.replayed for back in recoveries for one in back) / len(killed),
        different=found.different(plain),
    )


def predicted(events: Path, way: Parts, window: int, mtbf_s: float) -> float | None:
    """ETTR by the closed formula, from measurements of the run."""
    try:
        profile = run_profile.derive(events, {})
        options = Options(
            window=window,
            mtbf_s=mtbf_s,
            frozen_saving=_FROZEN_SAVING if way.freeze == ON else 0.0,
            by_popularity=way.order == POPULARITY,
            localized=way.recovery == LOCALIZED,
        )
        return build('ours', options, profile).costs.ettr_exact()
    except (ProfileError, FieldError):
        return None


def _span_s(iterations: Sequence[Iteration]) -> float:
    """Seconds from the first counted iteration to the last."""
    return iterations[-1].time - iterations[_WARM_UP].time


def _useful_s(iterations: Sequence[Iteration], plain: Trained) -> float:
    """Seconds of the same iterations in plain Megatron."""
    trained = iterations[-1].number - iterations[_WARM_UP].number
    return trained * statistics.median(plain.log.wall_seconds(_WARM_UP))


def summarize(
    hardware: Hardware, bench: Bench, rounds: Sequence[Sequence[Measured]]
) -> AblationReport:
    """Compute ratios within each round, then over the rounds."""
    ways = [
        _way(way.title, runs, [of_round[0] for of_round in rounds])
        for way, runs in zip(WAYS, zip(*rounds, strict=True), strict=True)
    ]
    return AblationReport(hardware, STAGES, bench.window, bench.iterations, bench.trace, ways)


def _way(title: str, runs: Sequence[Measured], first: Sequence[Measured]) -> WayResult:
    known = [run.predicted for run in runs if run.predicted is not None]
    return WayResult(
        title=title,
        ettr=Spread.of([run.ettr for run in runs]),
        predicted=Spread.of(known) if known else None,
        recovery_s=Spread.of([run.recovery_s for run in runs]),
        ratio=Spread.of(
            [run.recovery_s / of_first.recovery_s
             for run, of_first in zip(runs, first, strict=True)]
        ),
        phases={
            name: statistics.median(run.phases.get(name, 0.0) for run in runs)
            for name in dict.fromkeys(itertools.chain.from_iterable(run.phases for run in runs))
        },
        again=statistics.mean(run.again for run in runs),
        different=sorted({kind for run in runs for kind in run.different}),
    )  # fmt: skip


def print_report(report: AblationReport, console: Console) -> None:
    """Print the report for people."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    say(report.hardware.line())
    table = Table('')
    for column in ('recovery s', 'ratio', 'stage-iterations again', 'ETTR', 'predicted'):
        table.add_column(column, justify='right')
    for way in report.ways:
        prediction = '-' if way.predicted is None else way.predicted.text(3)
        table.add_row(way.title, way.recovery_s.text(), way.ratio.text(), f'{way.again:.1f}',
                      way.ettr.text(3), prediction)  # fmt: skip
    console.print(table)
    for way in report.ways:
        phases = ', '.join(f'{name} {value:.2f}' for name, value in way.phases.items() if value)
        say(f'{way.title}: {phases} s')
    faults = ', '.join(f'rank {rank} after {after}' for after, rank in report.faults)
    say(
        f'{report.stages} stages on {report.stages} emulated nodes, windows of {report.window}, '
        f'{report.iterations} iterations; killed: {faults}.'
    )
    for way in report.ways:
        verdict = f'differs in: {", ".join(way.different)}' if way.different else 'equal'
        say(f'Final state against that of plain Megatron, {way.title}: {verdict}.')


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the flags; exits with a message if they are wrong."""
    parser = Parser(prog='python -m tools.bench.ablation', description=__doc__)
    add = parser.add_argument
    add('--rounds', type=int, default=2, help='turns of all ways (default: 2)')
    add('--window', type=int, default=6, help='iterations per window (default: 6)')
    add('--faults', type=int, default=3, help='workers that are killed in each job (default: 3)')
    add('--output', type=Path, default=Path('runs/bench'), help='folder for logs')
    add('--json', type=Path, metavar='FILE', help='write everything here')
    args = parser.parse_args(argv)
    for flag in ('rounds', 'window', 'faults'):
        if getattr(args, flag) < 1:
            parser.error(f'--{flag} {getattr(args, flag)}: must be at least 1')
    return args


def measure(args: argparse.Namespace, console: Console) -> AblationReport:
    """Run all rounds.

    Raises:
        LabError: a run failed.
    """
    hardware = Hardware.here(gpu=False)
    output = args.output.resolve() / 'ablation'
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    data = prepare_text(args.output.resolve() / 'data')
    bench = Bench(data, output, args.window, args.faults)
    plain = bench.plain()
    rounds: list[list[Measured]] = []
    for number in range(1, args.rounds + 1):
        rounds.append([])
        for way in WAYS:
            found = bench.hurt(number, way, plain)
            rounds[-1].append(found)
            console.print(
                f'{number}: {found.recovery_s:6.2f} s, ETTR {found.ettr:.3f}  {way.title}',
                highlight=False,
            )
    return summarize(hardware, bench, rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    return run_benchmark(
        'bench_ablation',
        lambda console: measure(args, console),
        print_report,
        args.json,
        passed=lambda report: report.exact,
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
