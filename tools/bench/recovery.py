# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a recovery: localized, as a whole job, and from torch_dist checkpoints.

    moevement bench recovery --json recovery.json
    moevement bench recovery --lose all

A GPT on 4 pipeline stages, each on its own emulated node. The benchmark kills one worker, or all,
and measures the time until the last rank logs an iteration that was not committed before the kill:

  localized, hot spare   a process that has imported the program replaces the worker
  localized              a new process replaces the worker
  whole job              all workers are killed and restarted, as torchrun does; they recover
                         from windows in host memory
  torch_dist             the same, from the last torch_dist checkpoint
  whole-job-elastic      the whole job with --sparse-ckpt-elastic restart, in the same layout; only
                         where --only names it

If all workers are killed, no recovery is localized. The kill comes halfway between two checkpoints.

Exit status: 0 done, 1 states that must be equal differ, 2 a run failed or did not recover.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from moevement_ext.config import LOCALIZED, RESTART, WHOLE_JOB
from moevement_ext.events import Event, NextTier, Recovered, WorkerStarted

from ..lab.arguments import Parser
from ..lab.benchmark import add_output_flags, exit_on_sigterm, prepare, run_benchmark
from ..lab.errors import LabError
from ..lab.evidence import Tier, kind_of
from ..lab.figures import Spread, medians
from ..lab.following import read_events
from ..lab.hardware import Hardware
from ..lab.job import Job, Trained, memory_directory, train
from ..lab.launch import Launch, add_share_gpu
from ..lab.models import dense_flags, native_precision, sparse_flags
from ..lab.run_log import RunLog
from ..lab.tables import say, table
from . import model

STAGES = 4
VICTIM = 2
"""A rank whose stage has neighbours on both sides."""
WORKER, ALL = 'worker', 'all'
SPARE, COLD, WHOLE, DISK = 'localized-spare', 'localized', 'whole-job', 'torch-dist'
ELASTIC = 'whole-job-elastic'
TITLES = {
    SPARE: 'localized, hot spare',
    COLD: 'localized',
    WHOLE: 'whole job, host memory',
    DISK: 'whole job, torch_dist',
    ELASTIC: 'whole job, --sparse-ckpt-elastic, same layout',
}
USUAL = tuple(name for name in TITLES if name != ELASTIC)


class Comeback(msgspec.Struct, frozen=True):
    """The recovery of one job that lost workers."""

    seconds: float
    """Seconds from the kill to the first new iteration."""
    phases: dict[str, float]
    """Seconds by phase, in order; their sum is `seconds`."""
    stage_iterations: int
    """Number of repeated iterations, times the number of stages that repeated them."""
    different: list[str]
    """Kinds of state that differ from the undisturbed run."""


class MethodResult(msgspec.Struct, frozen=True):
    """One way to recover, over all rounds."""

    title: str
    seconds: Spread
    ratio: Spread
    """Seconds divided by those of the first way in the same round."""
    phases: dict[str, float]
    """Median seconds by phase; 0 in a round without it."""
    stage_iterations: float
    different: list[str]


class RecoveryReport(msgspec.Struct, frozen=True):
    """Results of all ways to recover."""

    hardware: Hardware
    lose: str
    """The killed workers: one worker, or all."""
    stages: int
    window: int
    kill_after: int
    dense_interval: int
    methods: dict[str, MethodResult]
    rounds: list[dict[str, Comeback]]

    @property
    def exact(self) -> bool:
        """True if sparse checkpointing always led to the bits of an undisturbed run."""
        return not any(one.different for name, one in self.methods.items() if name != DISK)


# ---- phases


def sparse_recovery(
    log: RunLog, killed_at: float, events: Sequence[Event], different: list[str]
) -> Comeback:
    """Phases in the events of the slowest of the ranks that repeated most iterations.

    Args:
        log: log of the last rank, over all its processes.
        killed_at: time of the signal (seconds since the epoch).
        events: those of all ranks, in the order of time.
        different: kinds of state that differ from the undisturbed run.
    """
    after = [event for event in events if event.time > killed_at]
    for event in kind_of(after, NextTier):
        raise LabError(f'host memory was not used: {event.reason}')
    back = {event.rank: event for event in kind_of(after, Recovered)}
    if missing := sorted(set(range(STAGES)) - set(back)):
        raise LabError(f'ranks {missing} did not report a recovery')
    slowest = max(back.values(), key=lambda event: (event.replayed, event.time))
    started = [event for event in kind_of(after, WorkerStarted) if event.rank == slowest.rank]
    before = [item.number for item in log.attempts[0] if item.time <= killed_at]
    committed = slowest.target if slowest.localized else before[-1]
    assert isinstance(committed, int)  # a localized recovery always sets it
    new = log.first_after(committed)
    last = max(event.time for event in back.values())
    phases = {
        'process start': started[-1].time - killed_at,
        **{name.replace('_', ' '): value for name, value in slowest.seconds.items() if value},
        'all else': last - started[-1].time - sum(slowest.seconds.values()),
        'new iteration': new.time - last,
    }
    again = sum(event.replayed for event in back.values())
    return Comeback(new.time - killed_at, phases, again, different)


def dense_restart(log: RunLog, killed_at: float, different: list[str]) -> Comeback:
    """Phases in the log: restart with load, repeated iterations, first new iteration."""
    first, died_after = log.attempts[1][0], log.attempts[0][-1].number
    new = log.first_after(died_after)
    training_at = first.time - first.elapsed_ms / 1000
    again = [item.time for item in log.attempts[1] if item.number <= died_after]
    caught_up_at = max(again, default=training_at)
    phases = {
        'process start, load': training_at - killed_at,
        'recompute': caught_up_at - training_at,
        'new iteration': new.time - caught_up_at,
    }
    recomputed = STAGES * (died_after - first.number + 1)
    return Comeback(new.time - killed_at, phases, recomputed, different)


# ---- over the rounds


def over_rounds(rounds: Sequence[dict[str, Comeback]]) -> dict[str, MethodResult]:
    """Each way to recover; ratios are taken within a round."""
    return {name: _method(name, rounds) for name in rounds[0]}


def _method(name: str, rounds: Sequence[dict[str, Comeback]]) -> MethodResult:
    runs, first = [runs[name] for runs in rounds], next(iter(rounds[0]))
    return MethodResult(
        title=TITLES[name],
        seconds=Spread.of([run.seconds for run in runs]),
        ratio=Spread.of([runs[name].seconds / runs[first].seconds for runs in rounds]),
        phases=medians([run.phases for run in runs]),
        stage_iterations=statistics.median(run.stage_iterations for run in runs),
        different=sorted({kind for run in runs for kind in run.different}),
    )


def print_report(report: RecoveryReport, console: Console) -> None:
    say(console, report.hardware.line())
    columns = ('', '>seconds to a new iteration', '>ratio', '>stage-iterations again')
    rows = (
        (one.title, one.seconds.text(), one.ratio.text(), f'{one.stage_iterations:.0f}')
        for one in report.methods.values()
    )
    console.print(table(columns, rows))
    for method in report.methods.values():
        phases = ', '.join(f'{name} {value:.2f}' for name, value in method.phases.items())
        say(console, f'{method.title}: {phases} s')
    victim = f'rank {VICTIM}' if report.lose == WORKER else 'all'
    say(
        console,
        f'{report.stages} stages on {report.stages} emulated nodes, {len(report.rounds)} rounds; '
        f'{victim} killed after iteration {report.kill_after}; window {report.window}, '
        f'torch_dist every {report.dense_interval} iterations.',
    )
    for method in report.methods.values():
        verdict = f'differs in: {", ".join(method.different)}' if method.different else 'equal'
        what = f'Final state against that of an undisturbed run, {method.title}'
        say(console, f'{what}: {verdict}.')


_ITERATIONS_AFTER = 3
_MAX_RESTARTS = 1000


class Bench(NamedTuple):
    """Parameters of the benchmark."""

    data: Path
    output: Path
    window: int
    lose: str = WORKER
    share_gpu: bool = False
    only: Sequence[str] = USUAL

    @property
    def methods(self) -> list[str]:
        return [
            name
            for name in TITLES
            if name in self.only and (self.lose == WORKER or name not in (SPARE, COLD))
        ]

    def undisturbed(self, iterations: int) -> Trained:
        return train(self._launch(self.output / 'undisturbed', self.training_flags(iterations)))

    def localized(self, method: str, number: int, kill_at: int, reference: Trained) -> Comeback:
        """Kill one worker, which the launcher replaces."""
        folder = self.output / f'{number}-{method}'
        with memory_directory() as memory:
            flags = self.training_flags(kill_at + _ITERATIONS_AFTER)
            flags += self._sparse_flags(memory, folder, LOCALIZED)
            spares = 1 if method == SPARE else 0
            launch = self._launch(folder, flags, _MAX_RESTARTS, spares)
            found = train(launch, lambda job: job.kill_after(kill_at, [VICTIM]))
        back = found.recovery
        if back is None or back.tier is not Tier.LOCALIZED or back.died != 1:
            raise LabError(f'{method}: the recovery was not localized; see {folder}')
        assert found.hurt_at is not None
        different = found.different(reference)
        return sparse_recovery(found.log, found.hurt_at, found.events, different)

    def restarted(
        self, method: str, number: int, kill_at: int, interval: int, reference: Trained
    ) -> Comeback:
        """Kill workers, so that the launcher kills the others and restarts all."""
        folder = self.output / f'{number}-{method}'
        with memory_directory() as memory, self._checkpoints() as checkpoints:
            flags = self.training_flags(kill_at + _ITERATIONS_AFTER)
            if method == DISK:
                flags += dense_flags(Path(checkpoints), interval, asynchronous=False)
            else:
                flags += self._sparse_flags(memory, folder, WHOLE_JOB)
                flags += ['--sparse-ckpt-elastic', RESTART] if method == ELASTIC else []
            with Job(self._launch(folder / 'killed', flags)) as job:
                victims = [VICTIM] if self.lose == WORKER else range(STAGES)
                killed_at = job.kill_after(kill_at, victims)
                job.wait()
                before = job.read_log()
            again = train(self._launch(folder / 'recovered', flags))
        log = RunLog([*before.attempts, *again.log.attempts], [])
        if len(log.attempts) != 2:
            raise LabError(f'{method}: killed once, but the logs have {len(log.attempts)} attempts')
        different = again.different(reference)
        if method == DISK:
            return dense_restart(log, killed_at, different)
        return sparse_recovery(log, killed_at, read_events(folder / 'events'), different)

    def training_flags(self, iterations: int) -> list[str]:
        """Flags of the other benchmarks with another layout: the last value of a flag counts."""
        layout = ['--pipeline-model-parallel-size', str(STAGES)]
        layout += ['--expert-model-parallel-size', '1']
        precision = native_precision(self.share_gpu)
        return model.training_flags(self.data, 2, iterations, precision) + layout

    def _launch(
        self, folder: Path, flags: Sequence[str], max_restarts: int = 0, spares: int = 0
    ) -> Launch:
        return Launch(folder, flags, STAGES, 1, max_restarts, spares, share_gpu=self.share_gpu)

    def _sparse_flags(self, memory: Path, folder: Path, recovery: str) -> list[str]:
        flags = sparse_flags(memory, model.RUN_ID, self.window, folder / 'events')
        return [*flags, '--sparse-ckpt-recovery', recovery]

    def _checkpoints(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix='checkpoints-', dir=self.output)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement bench recovery', description=__doc__)
    add = parser.add_argument
    add('--lose', choices=(WORKER, ALL), default=WORKER, help='workers to kill (default: worker)')
    add('--only', choices=TITLES, nargs='+', default=list(USUAL), help='ways to recover (default: '
        'all but the last)')  # fmt: skip
    add('--rounds', type=int, default=2, help='rounds over all ways (default: 2)')
    add('--window', type=int, default=4, help='iterations per window (default: 4)')
    add('--dense-interval', type=int, default=10, help='iterations between torch_dist checkpoints '
        '(default: 10)')  # fmt: skip
    add_output_flags(parser)
    add_share_gpu(parser)
    args = parser.parse_args(argv)
    parser.require_at_least_1(args, 'rounds', 'window', 'dense_interval')
    if args.lose == ALL and not {WHOLE, DISK, ELASTIC} & set(args.only):
        parser.error(f'--only {" ".join(args.only)}: not with --lose {ALL}')
    return args


def measure(args: argparse.Namespace, console: Console) -> RecoveryReport:
    hardware = Hardware.here(gpu=args.share_gpu)
    output, data = prepare(args, 'recovery')
    bench = Bench(data, output, args.window, args.lose, args.share_gpu, args.only)
    interval = args.dense_interval
    # Halfway between two checkpoints, once at least two windows are complete.
    kill_at = interval * math.ceil(2 * args.window / interval) + interval // 2
    reference = bench.undisturbed(kill_at + _ITERATIONS_AFTER)
    rounds: list[dict[str, Comeback]] = []
    for number in range(1, args.rounds + 1):
        rounds.append({})
        for name in bench.methods:
            if name in (WHOLE, DISK, ELASTIC):
                found = bench.restarted(name, number, kill_at, interval, reference)
            else:
                found = bench.localized(name, number, kill_at, reference)
            rounds[-1][name] = found
            console.print(f'{number}: {found.seconds:6.2f} s  {TITLES[name]}', highlight=False)
    return RecoveryReport(
        hardware, args.lose, STAGES, args.window, kill_at, interval, over_rounds(rounds), rounds
    )


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    return run_benchmark('bench_recovery', parse_arguments(argv), measure, print_report)


if __name__ == '__main__':
    sys.exit(main())
