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
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from moevement_ext.config import LOCALIZED, RESTART, WHOLE_JOB
from moevement_ext.events import Event, NextTier, Recovered, WorkerStarted

from ..lab.arguments import Parser, at_least
from ..lab.benchmark import add_output_flags, exit_on_sigterm, prepare, run_benchmark
from ..lab.errors import LabError
from ..lab.evidence import Tier, kind_of
from ..lab.figures import medians
from ..lab.following import read_events
from ..lab.hardware import Hardware
from ..lab.job import Job, Trained, memory_directory, train
from ..lab.launch import Launch, add_share_gpu
from ..lab.models import dense_flags, native_precision, sparse_flags
from ..lab.run_log import RunLog
from ..lab.tables import say
from . import model
from .frame import Report, over_rounds, print_ways, take_turns

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
_ITERATIONS_AFTER = 3
_MAX_RESTARTS = 1000
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


FIGURES: dict[str, Callable[[Comeback, Comeback], float]] = {
    'seconds': lambda one, first: one.seconds,
    'ratio': lambda one, first: one.seconds / first.seconds,
    'stage_iterations': lambda one, first: one.stage_iterations,
}
_COLUMNS = {
    'seconds': ('seconds to a new iteration', 2),
    'ratio': ('ratio', 2),
    'stage_iterations': ('stage-iterations again', 0),
}


def summarize(
    hardware: Hardware, settings: dict[str, object], rounds: list[dict[str, Comeback]]
) -> Report:
    """Report; plain checkpoints need not lead to the bits of an undisturbed run."""
    ways = over_rounds(rounds, TITLES, FIGURES)
    kinds = {name: _different(name, rounds) for name in ways if name != DISK}
    different = [f'{TITLES[name]}: {", ".join(found)}' for name, found in kinds.items() if found]
    return Report(hardware, settings, ways, different, rounds)


def _different(name: str, rounds: list[dict[str, Comeback]]) -> list[str]:
    return sorted({kind for one in rounds for kind in one[name].different})


def print_report(report: Report, console: Console) -> None:
    say(console, report.hardware.line())
    print_ways(report.ways.values(), _COLUMNS, console)
    for name, way in report.ways.items():
        phases = medians([one[name].phases for one in report.rounds])
        say(console, f'{way.title}: {", ".join(f"{p} {s:.2f}" for p, s in phases.items())} s')
    settings = report.settings
    victim = f'rank {VICTIM}' if settings['lose'] == WORKER else 'all'
    say(
        console,
        f'{STAGES} stages on {STAGES} emulated nodes, {len(report.rounds)} rounds; {victim} killed '
        f'after iteration {settings["kill_after"]}; window {settings["window"]}, torch_dist every '
        f'{settings["dense_interval"]} iterations.',
    )
    for name, way in report.ways.items():
        differ = ', '.join(_different(name, report.rounds))
        what = f'Final state against that of an undisturbed run, {way.title}'
        say(console, f'{what}: {f"differs in: {differ}" if differ else "equal"}.')


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
    add('--rounds', type=at_least(1), default=2, help='rounds over all ways (default: 2)')
    add('--window', type=at_least(1), default=4, help='iterations per window (default: 4)')
    add('--dense-interval', type=at_least(1), default=10, help='iterations between torch_dist '
        'checkpoints (default: 10)')  # fmt: skip
    add_output_flags(parser)
    add_share_gpu(parser)
    args = parser.parse_args(argv)
    if args.lose == ALL and not {WHOLE, DISK, ELASTIC} & set(args.only):
        parser.error(f'--only {" ".join(args.only)}: not with --lose {ALL}')
    return args


def measure(args: argparse.Namespace, console: Console) -> Report:
    hardware = Hardware.here(gpu=args.share_gpu)
    output, data = prepare(args, 'recovery')
    bench = Bench(data, output, args.window, args.lose, args.share_gpu, args.only)
    interval = args.dense_interval
    # Halfway between two checkpoints, once at least two windows are complete.
    kill_at = interval * math.ceil(2 * args.window / interval) + interval // 2
    reference = bench.undisturbed(kill_at + _ITERATIONS_AFTER)

    def run(name: str, number: int) -> Comeback:
        if name in (WHOLE, DISK, ELASTIC):
            return bench.restarted(name, number, kill_at, interval, reference)
        return bench.localized(name, number, kill_at, reference)

    titles = {name: TITLES[name] for name in bench.methods}
    rounds = take_turns(args.rounds, titles, run, lambda one: one.seconds, console)
    settings = {
        'lose': args.lose,
        'window': args.window,
        'kill_after': kill_at,
        'dense_interval': interval,
    }
    return summarize(hardware, settings, rounds)


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    return run_benchmark('bench_recovery', parse_arguments(argv), measure, print_report)


if __name__ == '__main__':
    sys.exit(main())
