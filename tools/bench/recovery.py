# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a recovery: localized, as a whole job, and from torch_dist checkpoints.

    moevement bench recovery --json recovery.json
    moevement bench recovery --lose all

A GPT on 4 pipeline stages, each on its own emulated node. The benchmark kills one worker, or all,
and measures the time until the last rank logs an iteration that was not committed before the kill:

  localized, hot spare   a process that has imported the program replaces the worker
  localized              a new process replaces the worker
  localized-torchrun     under `moevement torchrun`, one agent a node; only where --only names it
  whole job, hot spare   the launcher kills and restarts all workers, which recover from windows in
                         host memory
  torch_dist             a new launcher starts them, from the last torch_dist checkpoint
  whole-job-elastic      the whole job with --sparse-ckpt-elastic restart, in the same layout; only
                         where --only names it

If all workers are killed, no recovery is localized. The kill comes halfway between two checkpoints.

Exit status: 0 done, 1 states that must be equal differ, 2 a run failed or did not recover.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from moevement_ext.config import LOCALIZED, RESTART, WHOLE_JOB
from moevement_ext.events import Event, FailureDetected, NextTier, Recovered, WorkerStarted

from ..lab import presets, trainer
from ..lab.evidence import Tier, kind_of
from ..lab.figures import medians
from ..lab.history import History
from ..lab.job import Job, memory_directory, train
from ..lab.launch import Launch, Launcher
from ..lab.models import dense_flags, native_precision, sparse_flags
from ..lab.programs import LabError
from ..lab.run_log import RunLog
from ..lab.torchrun import ForkingAgents
from .comeback import comeback, stage_iterations
from .frame import Bench, Figure, Report

STAGES = 4
VICTIM = 2
"""A rank whose stage has neighbours on both sides."""
WORKER, ALL = 'worker', 'all'
SPARE, COLD, WHOLE, DISK = 'localized-spare', 'localized', 'whole-job', 'torch-dist'
ELASTIC, TORCHRUN = 'whole-job-elastic', 'localized-torchrun'
_OF_ONE_WORKER = (SPARE, COLD, TORCHRUN)
_ITERATIONS_AFTER = 3
_MAX_RESTARTS = 1000


class Back(msgspec.Struct, frozen=True):
    """The recovery of one job that lost workers."""

    seconds: float
    """Seconds from the kill to the first new iteration."""
    away_s: float | None
    """Those of the launcher, the report and the demo, without that iteration; None: no events."""
    phases: dict[str, float]
    """Seconds by phase: those of every recovery, then parts of them by the engine."""
    stage_iterations: float
    """Number of repeated iterations, times the number of stages that repeated them."""
    different: list[str]
    """Kinds of state that differ from the undisturbed run."""


def recovered(
    log: RunLog, killed_at: float, events: Sequence[Event], different: list[str], dense: bool
) -> Back:
    """Evaluate a job that lost workers.

    Args:
        log: log of the last rank, over all its processes.
        killed_at: time of the signal (seconds since the epoch).
        events: those of all ranks.
        different: kinds of state that differ from the undisturbed run.
        dense: checkpoints of Megatron are the only ones.

    Raises LabError: the job did not recover, or not from windows in host memory.
    """
    after = [event for event in events if event.time > killed_at]
    for event in kind_of(after, NextTier):
        raise LabError(f'host memory was not used: {event.reason}')
    back = {event.rank for event in kind_of(after, Recovered)}
    if not dense and (missing := sorted(set(range(STAGES)) - back)):
        raise LabError(f'ranks {missing} did not report a recovery')
    started = [event.time for event in kind_of(after, WorkerStarted)]
    found = comeback(log, after, started, killed_at)
    engine = {name.replace('_', ' '): seconds for name, seconds in found.engine.items()}
    again = stage_iterations(log, after, STAGES)
    noticed = [event.time for event in kind_of(after, FailureDetected) if event.reason is not None]
    if noticed:
        engine['noticed'] = min(noticed) - killed_at
    away_s = None if dense else History(events).episodes[-1].away_s(events[-1].time)
    return Back(found.seconds, away_s, {**found.phases, **engine}, again, different)


class RecoveryBench(Bench):
    """Recoveries of a job that lost workers."""

    PROG, ROUNDS = 'moevement bench recovery', 2
    TITLES = {
        SPARE: 'localized, hot spare',
        COLD: 'localized',
        WHOLE: 'whole job, hot spare',
        DISK: 'whole job, torch_dist',
        ELASTIC: 'whole job, --sparse-ckpt-elastic, same layout',
        TORCHRUN: 'localized, moevement torchrun',
    }
    ONLY = 'ways to recover (default: all but the last two)', [*TITLES][:-2]
    FIGURES = {
        'away_s': Figure('s away'),
        'seconds': Figure('s to a new iteration'),
        'ratio': Figure('ratio', of=lambda one, first: one.seconds / first.seconds),
        'stage_iterations': Figure('stage-iterations again', '.0f'),
    }

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        if args.lose == ALL and set(args.only) <= set(_OF_ONE_WORKER):
            parser.error(f'--only {" ".join(args.only)}: not with --lose {ALL}')

    def __init__(self, args: argparse.Namespace, output: Path, data: Path) -> None:
        super().__init__(args, output, data)
        # Halfway between two checkpoints, once at least two windows are complete.
        interval = args.dense_interval
        self.kill_at = interval * math.ceil(2 * args.window / interval) + interval // 2
        # Flags of the other benchmarks with another layout.
        precision = native_precision(args.share_gpu)
        iterations = self.kill_at + _ITERATIONS_AFTER
        self._flags = presets.measured_flags(data, iterations, precision, STAGES)
        self._ballast: Path | None = None
        self._reference = train(self._launch(output / 'undisturbed', self._flags))

    def titles(self) -> Mapping[str, str]:
        left_out = _OF_ONE_WORKER if self.args.lose == ALL else ()
        asked = set(self.args.only).difference(left_out)
        return {way: title for way, title in self.TITLES.items() if way in asked}

    def run(self, way: str, number: int) -> Back:
        folder = self.output / f'{number}-{way}'
        with (
            memory_directory() as memory,
            memory_directory() as other,
            tempfile.TemporaryDirectory(prefix='checkpoints-', dir=self.output) as checkpoints,
        ):
            if way == DISK:
                interval = self.args.dense_interval
                own = dense_flags(Path(checkpoints), interval, asynchronous=False)
            else:
                own = sparse_flags(memory, presets.RUN_ID, self.args.window, folder / 'events')
                scope = LOCALIZED if way in _OF_ONE_WORKER else WHOLE_JOB
                own += ['--sparse-ckpt-recovery', scope]
                own += ['--sparse-ckpt-elastic', RESTART] if way == ELASTIC else []
            self._ballast = trainer.file_in(other, self.args.ballast)
            flags = [*self._flags, *own]
            if way == DISK:
                return self._relaunched(folder, flags)
            return self._back(way, folder, flags)

    @property
    def _victims(self) -> Sequence[int]:
        return [VICTIM] if self.args.lose == WORKER else range(STAGES)

    def _back(self, way: str, folder: Path, flags: Sequence[str]) -> Back:
        """Kill workers, which the launcher replaces."""
        launch = self._launch(folder, flags, _MAX_RESTARTS, int(way != COLD))
        launcher = ForkingAgents if way == TORCHRUN else Launcher.LOCAL
        found = train(launch, lambda job: job.kill_after(self.kill_at, self._victims), launcher)
        back, hurt_at = found.recovery, found.hurt_at
        expected = (Tier.LOCALIZED, 1) if way in _OF_ONE_WORKER else (Tier.WHOLE_JOB, STAGES)
        if hurt_at is None or back is None or (back.tier, back.died) != expected:
            raise LabError(f'{way}: it was another recovery; see {folder}')
        different = found.different(self._reference)
        return recovered(found.log, hurt_at, found.events, different, dense=False)

    def _relaunched(self, folder: Path, flags: Sequence[str]) -> Back:
        """Kill workers and start all again, as torchrun does, from a torch_dist checkpoint."""
        with Job(self._launch(folder / 'killed', flags)) as job:
            killed_at = job.kill_after(self.kill_at, self._victims)
            job.wait()
            before = job.read_log()
        again = train(self._launch(folder / 'recovered', flags))
        log = RunLog([*before.attempts, *again.log.attempts], [])
        return recovered(log, killed_at, [], again.different(self._reference), dense=True)

    def _launch(
        self, folder: Path, flags: Sequence[str], max_restarts: int = 0, spares: int = 0
    ) -> Launch:
        share = self.args.share_gpu
        launch = Launch(folder, flags, STAGES, 1, max_restarts, spares, share_gpu=share)
        if self._ballast is None:
            return launch
        variables = {trainer.BALLAST: str(self._ballast)}
        return launch._replace(variables=variables, program_file=trainer.__file__)

    def different(self, rounds: Sequence[Mapping[str, Back]]) -> list[str]:
        """Plain checkpoints need not lead to the bits of an undisturbed run."""
        differ = {way: _different(way, rounds) for way in rounds[0] if way != DISK}
        return [f'{self.TITLES[way]}: {", ".join(kinds)}' for way, kinds in differ.items() if kinds]

    def notes(self, report: Report) -> Iterator[str]:
        for name, way in report.ways.items():
            phases = medians([one[name].phases for one in report.rounds])
            yield f'{way.title}: {", ".join(f"{p} {s:.2f}" for p, s in phases.items())} s'
        victim = f'rank {VICTIM}' if self.args.lose == WORKER else 'all'
        yield (
            f'{STAGES} stages on {STAGES} emulated nodes, {len(report.rounds)} rounds; {victim} '
            f'killed after iteration {self.kill_at}; window {self.args.window}, torch_dist every '
            f'{self.args.dense_interval} iterations.'
        )
        for name, way in report.ways.items():
            differ = ', '.join(_different(name, report.rounds))
            what = f'Final state against that of an undisturbed run, {way.title}'
            yield f'{what}: {f"differs in: {differ}" if differ else "equal"}.'


def _different(way: str, rounds: Sequence[Mapping[str, Back]]) -> list[str]:
    return sorted({kind for one in rounds for kind in one[way].different})


main = RecoveryBench.main
