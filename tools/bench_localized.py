#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures localized recovery of one lost pipeline stage, against restarts of the whole job.

    python -m tools.bench_localized --json localized.json

A GPT on 4 pipeline stages, each on an emulated node of its own. One worker is killed; measured is
the time until the last rank has logged an iteration that was not committed at the kill:

  localized, hot spare   only that worker is replaced, by a process that has imported the program
  localized              only that worker is replaced, by a new process
  whole job              all workers are killed and started again, as torchrun does; they recover
                         from windows in host memory
  torch_dist             the same, from the last torch_dist checkpoint

The checkpoints of the last come at the interval at which their stalls cost as much per iteration as
sparse checkpointing with its logs does here, --longest-interval at most; the worker is killed half
way between two. What protection costs is measured first, in runs that take turns: plain Megatron,
windows alone (`--sparse-ckpt-recovery whole-job`), windows and logs, and torch_dist each time.

The lower bound of a replay is what the stage alone takes to compute the replayed micro-batches:
the CPU seconds of its process per micro-batch in the plain runs; waiting is no part of these.

Exit status: 0 done, 1 a state that must be equal differs, 2 a run failed or did not recover.
"""

import argparse
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

import numpy as np
import psutil
from rich.console import Console

from moevement_ext.config import LOCALIZED, WHOLE_JOB
from tools.bench import model
from tools.bench.figures import write_json
from tools.bench.hardware import Hardware
from tools.bench.jobs import (
    captured,
    exit_on_sigterm,
    memory_directory,
    print_failure,
    wall_seconds,
)
from tools.bench.localized import (
    COLD,
    DENSE,
    DISK,
    LOGS,
    PLAIN,
    SPARE,
    STAGES,
    TITLES,
    VICTIM,
    WINDOWS,
    Cost,
    Recovery,
    Report,
    equal_interval,
    localized_recovery,
    print_report,
    summarize,
)
from tools.bench_recovery import dense_recovery, sparse_recovery
from tools.chaos import evidence as chaos_evidence
from tools.chaos.job import Job
from tools.compare_digests import DigestFileError, StateDigest, differences, read_digest
from tools.demo import evidence
from tools.demo.failure import DemoError
from tools.plot_run import parse_log

_WARM_UP = 4
_ITERATIONS_AFTER = 3
_SAVED = re.compile(r'save-checkpoint \.+: \([\d.]+, ([\d.]+)\)')
_LOG_RING = 'upstream-log'
_LATE_ITERATIONS = 4  # that the log reaches back beyond two windows
_ENVIRONMENT = {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'GLOO_SOCKET_IFNAME': 'lo'}


class Bench(NamedTuple):
    """What is to be run."""

    data: Path
    output: Path
    window: int
    iterations: int

    def cost(self, variant: str, number: int) -> Cost:
        """Run one way to protect a job to its end.

        Raises:
            DemoError: it failed.
        """
        folder = self.output / f'cost{number}-{variant}'
        digest = folder / 'digest.json'
        with memory_directory() as memory, self._checkpoints() as checkpoints:
            flags = self._training_flags(self.iterations, digest)
            if variant == DENSE:
                flags += model.dense_flags(Path(checkpoints), 1, asynchronous=False)
            elif variant != PLAIN:
                recovery = LOCALIZED if variant == LOGS else WHOLE_JOB
                flags += self._sparse_flags(memory, folder, recovery)
            with Job(folder, flags, STAGES, 1, max_restarts=0) as job:
                clock: list[tuple[float, float]] = []
                host_bytes = ring_bytes = 0
                for log in job.follow('the end'):
                    spent = cpu_seconds(job.pids()[VICTIM]) if log.iterations else None
                    if spent is not None:
                        clock.append((time.time(), spent))
                    if len(log.iterations) == _WARM_UP:
                        host_bytes, ring_bytes = reserved(memory)
                log, text = job.read_log(), job.text(STAGES - 1)
        seconds = wall_seconds(log.iterations, _WARM_UP)
        measured = log.iterations[_WARM_UP - 1 :]
        times, used = zip(*clock, strict=True)
        stage = np.interp([measured[0].time, measured[-1].time], times, used)
        exposed = [line.exposed_ms for line in captured(text)][_WARM_UP:]
        return Cost(
            iteration_s=statistics.median(seconds),
            stage_cpu_s=float(stage[1] - stage[0]) / len(seconds),
            exposed_ms=statistics.mean(exposed or [0.0]),
            save_ms=statistics.median([float(ms) for ms in _SAVED.findall(text)] or [0.0]),
            host_bytes=host_bytes,
            log_bytes=ring_bytes // (2 * self.window + _LATE_ITERATIONS),
            digest=read_digest(digest).digest,
        )

    def undisturbed(self, iterations: int) -> StateDigest:
        """Final state of plain Megatron when nothing happens to it."""
        folder = self.output / 'undisturbed'
        digest = folder / 'digest.json'
        flags = self._training_flags(iterations, digest)
        with Job(folder, flags, STAGES, 1, max_restarts=0) as job:
            for _ in job.follow('the end'):
                pass
        return read_digest(digest)

    def localized(self, method: str, number: int, kill_at: int, reference: StateDigest) -> Recovery:
        """Kill one worker, which the launcher replaces.

        Raises:
            DemoError: the job failed, or more than one stage went back.
        """
        folder = self.output / f'{number}-{method}'
        digest = folder / 'digest.json'
        with memory_directory() as memory:
            flags = self._training_flags(kill_at + _ITERATIONS_AFTER, digest)
            flags += self._sparse_flags(memory, folder, LOCALIZED)
            spares = 1 if method == SPARE else 0
            with Job(folder, flags, STAGES, 1, spares=spares) as job:
                killed_at = kill_after(job, kill_at)
                for _ in job.follow('the end'):
                    pass
                log, events = job.read_log(), job.events()
                died_at = min(job.ended_at.values())  # the others ended later, and well
                found = chaos_evidence.recovery(events, job.pids(), killed_at, log.iterations)
        if found is None or found.tier is not chaos_evidence.Tier.LOCALIZED or found.died != 1:
            raise DemoError(f'{method}: the recovery was not localized; see {folder}')
        return localized_recovery(log, killed_at, died_at, events, _different(reference, digest))

    def restarted(
        self, method: str, number: int, kill_at: int, interval: int, reference: StateDigest
    ) -> Recovery:
        """Kill one worker, upon which the launcher kills the others; start all again.

        Raises:
            DemoError: the job failed, or did not recover in the way that is measured.
        """
        folder = self.output / f'{number}-{method}'
        digest = folder / 'digest.json'
        with memory_directory() as memory, self._checkpoints() as checkpoints:
            flags = self._training_flags(kill_at + _ITERATIONS_AFTER, digest)
            if method == DISK:
                flags += model.dense_flags(Path(checkpoints), interval, asynchronous=False)
            else:
                flags += self._sparse_flags(memory, folder, WHOLE_JOB)
            with Job(folder / 'killed', flags, STAGES, 1, max_restarts=0) as job:
                killed_at = kill_after(job, kill_at)
                job.wait()
                text = job.text(STAGES - 1)
            with Job(folder / 'recovered', flags, STAGES, 1, max_restarts=0) as job:
                for _ in job.follow('the end'):
                    pass
                text += job.text(STAGES - 1)
        log = parse_log(text)
        if len(log.lives) != 2:
            raise DemoError(f'{method}: killed once, but the logs have {len(log.lives)} lives')
        different = _different(reference, digest)
        if method == DISK:
            found = dense_recovery(log, killed_at, different)
        else:
            events = evidence.read_events(folder / 'events')
            found = sparse_recovery(log, killed_at, events, STAGES, different)
        return Recovery(
            seconds=found.seconds,
            phases=found.phases,
            stage_iterations=STAGES * found.recomputed,
            replay_s=0.0,
            different=different,
        )

    def _training_flags(self, iterations: int, digest: Path) -> list[str]:
        """Those of the other benchmarks, with another layout: the last of a flag counts."""
        layout = ['--pipeline-model-parallel-size', str(STAGES)]
        layout += ['--expert-model-parallel-size', '1']
        return model.training_flags(self.data, 2, iterations, digest) + layout

    def _sparse_flags(self, memory: Path, folder: Path, recovery: str) -> list[str]:
        flags = model.sparse_flags(memory, str(self.window), folder / 'events')
        return [*flags, '--sparse-ckpt-recovery', recovery]

    def _checkpoints(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix='checkpoints-', dir=self.output)


def cpu_seconds(pid: int) -> float | None:
    """That a process has used so far; None if it is gone."""
    try:
        spent = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return None
    return float(spent.user + spent.system)


def reserved(memory: Path) -> tuple[int, int]:
    """Bytes of everything in host memory, and of the rings of upstream logs within."""
    sizes = [(path.name, path.stat().st_size) for path in memory.rglob('*') if path.is_file()]
    return sum(size for _, size in sizes), sum(s for name, s in sizes if name == _LOG_RING)


def kill_after(job: Job, iteration: int) -> float:
    """SIGKILL the victim once an iteration is logged; returns when (seconds since the epoch).

    Raises:
        DemoError: the job ended before.
    """
    for log in job.follow(f'iteration {iteration}'):
        if log.iterations and log.iterations[-1].number >= iteration:
            return job.strike([VICTIM], SIGKILL)
    raise DemoError(f'the job ended before iteration {iteration}', job.tail())


def _different(reference: StateDigest, digest: Path) -> list[str]:
    found = differences(reference, read_digest(digest))
    return sorted({difference.kind for difference in found})


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = argparse.ArgumentParser(
        prog='bench_localized',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('--rounds', type=int, default=2, help='turns of everything (default: 2)')
    add('--iterations', type=int, default=12, help='of a run for overhead (default: 12)')
    add('--window', type=int, default=4, help='iterations per window (default: 4)')
    add('--longest-interval', type=int, default=20, help='of torch_dist (default: 20)')
    add('--output', type=Path, default=Path('runs/bench'), help='folder for logs')
    add('--json', type=Path, metavar='FILE', help='write everything here')
    args = parser.parse_args(argv)
    for flag, value, least in (
        ('--rounds', args.rounds, 1),
        ('--iterations', args.iterations, _WARM_UP + 3),
        ('--window', args.window, 1),
        ('--longest-interval', args.longest_interval, 1),
    ):
        if value < least:
            parser.error(f'{flag} {value}: must be at least {least}')
    return args


def measure(args: argparse.Namespace, console: Console) -> Report:
    """All rounds.

    Raises:
        DemoError: a run failed.
    """
    hardware = Hardware.here(gpu=False)
    output = args.output.resolve() / 'localized'
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    data = model.prepare_data(args.output.resolve() / 'data')
    bench = Bench(data, output, args.window, args.iterations)
    costs: list[dict[str, Cost]] = []
    for number in range(1, args.rounds + 1):
        costs.append({})
        for variant in (PLAIN, WINDOWS, LOGS, DENSE):
            cost = costs[-1][variant] = bench.cost(variant, number)
            console.print(f'{number}: {1000 * cost.iteration_s:5.0f} ms  {variant}')
    interval = min(args.longest_interval, round(equal_interval(costs)))
    # Half way between two checkpoints, when at least two windows are complete.
    kill_at = interval * math.ceil(2 * args.window / interval) + interval // 2
    reference = bench.undisturbed(kill_at + _ITERATIONS_AFTER)
    rounds: list[dict[str, Recovery]] = []
    for number in range(1, args.rounds + 1):
        rounds.append({})
        for name, title in TITLES.items():
            if name in (SPARE, COLD):
                found = bench.localized(name, number, kill_at, reference)
            else:
                found = bench.restarted(name, number, kill_at, interval, reference)
            rounds[-1][name] = found
            console.print(f'{number}: {found.seconds:6.2f} s  {title}', highlight=False)
    return summarize(hardware, args.window, kill_at, interval, costs, rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    os.environ.update(_ENVIRONMENT)
    console = Console()
    try:
        report = measure(args, console)
    except DemoError as error:
        print_failure(console, 'bench_localized', error)
        return 2
    except DigestFileError as error:
        console.print(f'bench_localized: {error}', style='bold red', markup=False)
        return 2
    print_report(report, console)
    if args.json:
        write_json(args.json, report)
    return 0 if report.exact else 1


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
