# SPDX-License-Identifier: Apache-2.0
"""Measures localized recovery of one lost pipeline stage, against restarts of the whole job.

    python -m tools.bench.localized --json localized.json

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
from rich.console import Console

from moevement_ext.config import LOCALIZED, WHOLE_JOB
from tools.bench import model
from tools.bench.localized_report import (
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
    Comeback,
    Cost,
    LocalizedReport,
    equal_interval,
    localized_recovery,
    print_report,
    summarize,
)
from tools.bench.restarts import dense_restart, sparse_restart
from tools.lab import evidence
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.cpu_clock import cpu_seconds
from tools.lab.digests import StateDigest, kinds_of_difference, read_digest
from tools.lab.errors import LabError
from tools.lab.hardware import Hardware
from tools.lab.job import Job, memory_directory
from tools.lab.launch import Launch, add_share_gpu
from tools.lab.models import dense_flags, prepare_text
from tools.lab.run_log import parse_log
from tools.plan.flags import parse_megatron_flags
from tools.plan.memory import logged_per_iteration

_WARM_UP = 4
_ITERATIONS_AFTER = 3
_MAX_RESTARTS = 1000


class Bench(NamedTuple):
    """What is to be run."""

    data: Path
    output: Path
    window: int
    iterations: int
    share_gpu: bool = False

    def cost(self, variant: str, number: int) -> Cost:
        """Run one way to protect a job to its end.

        Raises:
            LabError: it failed.
        """
        folder = self.output / f'cost{number}-{variant}'
        digest = folder / 'digest.json'
        with memory_directory() as memory, self._checkpoints() as checkpoints:
            flags = self._training_flags(self.iterations, digest)
            if variant == DENSE:
                flags += dense_flags(Path(checkpoints), 1, asynchronous=False)
            elif variant != PLAIN:
                recovery = LOCALIZED if variant == LOGS else WHOLE_JOB
                flags += self._sparse_flags(memory, folder, recovery)
            with self._job(folder, flags) as job:
                clock: list[tuple[float, float]] = []
                host_bytes = 0
                for log in job.follow('the end'):
                    spent = cpu_seconds(job.pids()[VICTIM]) if log.iterations else None
                    if spent is not None:
                        clock.append((time.time(), spent))
                    if len(log.iterations) == _WARM_UP:
                        host_bytes = reserved(memory)
                log = job.read_log()
        seconds = log.wall_seconds(_WARM_UP)
        measured = log.iterations[_WARM_UP - 1 :]
        times, used = zip(*clock, strict=True)
        stage = np.interp([measured[0].time, measured[-1].time], times, used)
        exposed = [slot.exposed_ms for slot in log.captured][_WARM_UP:]
        return Cost(
            iteration_s=statistics.median(seconds),
            stage_cpu_s=float(stage[1] - stage[0]) / len(seconds),
            exposed_ms=statistics.mean(exposed or [0.0]),
            save_ms=statistics.median(log.saved_ms or [0.0]),
            host_bytes=host_bytes,
            log_bytes=logged_bytes(flags) if variant == LOGS else 0,
            digest=read_digest(digest).digest,
        )

    def undisturbed(self, iterations: int) -> StateDigest:
        """Final state of plain Megatron when nothing happens to it."""
        folder = self.output / 'undisturbed'
        digest = folder / 'digest.json'
        flags = self._training_flags(iterations, digest)
        with self._job(folder, flags) as job:
            job.finish()
        return read_digest(digest)

    def localized(self, method: str, number: int, kill_at: int, reference: StateDigest) -> Comeback:
        """Kill one worker, which the launcher replaces.

        Raises:
            LabError: the job failed, or more than one stage went back.
        """
        folder = self.output / f'{number}-{method}'
        digest = folder / 'digest.json'
        with memory_directory() as memory:
            flags = self._training_flags(kill_at + _ITERATIONS_AFTER, digest)
            flags += self._sparse_flags(memory, folder, LOCALIZED)
            spares = 1 if method == SPARE else 0
            with self._job(folder, flags, _MAX_RESTARTS, spares) as job:
                killed_at = kill_after(job, kill_at)
                log, events = job.finish(), job.events()
                died_at = min(job.ended_at.values())  # the others ended later, and well
                found = evidence.recovery(events, job.pids(), killed_at, log.iterations)
        if found is None or found.tier is not evidence.Tier.LOCALIZED or found.died != 1:
            raise LabError(f'{method}: the recovery was not localized; see {folder}')
        different = kinds_of_difference(reference, read_digest(digest))
        return localized_recovery(log, killed_at, died_at, events, different)

    def restarted(
        self, method: str, number: int, kill_at: int, interval: int, reference: StateDigest
    ) -> Comeback:
        """Kill one worker, upon which the launcher kills the others; start all again.

        Raises:
            LabError: the job failed, or did not recover in the way that is measured.
        """
        folder = self.output / f'{number}-{method}'
        digest = folder / 'digest.json'
        with memory_directory() as memory, self._checkpoints() as checkpoints:
            flags = self._training_flags(kill_at + _ITERATIONS_AFTER, digest)
            if method == DISK:
                flags += dense_flags(Path(checkpoints), interval, asynchronous=False)
            else:
                flags += self._sparse_flags(memory, folder, WHOLE_JOB)
            with self._job(folder / 'killed', flags) as job:
                killed_at = kill_after(job, kill_at)
                job.wait()
                text = job.text()
            with self._job(folder / 'recovered', flags) as job:
                job.finish()
                text += job.text()
        log = parse_log(text)
        if len(log.lives) != 2:
            raise LabError(f'{method}: killed once, but the logs have {len(log.lives)} lives')
        different = kinds_of_difference(reference, read_digest(digest))
        if method == DISK:
            found = dense_restart(log, killed_at, different)
        else:
            events = evidence.read_events(folder / 'events')
            found = sparse_restart(log, killed_at, events, STAGES, different)
        return Comeback(
            seconds=found.seconds,
            phases=found.phases,
            stage_iterations=STAGES * found.recomputed,
            replay_s=0.0,
            different=different,
        )

    def _job(
        self, folder: Path, flags: Sequence[str], max_restarts: int = 0, spares: int = 0
    ) -> Job:
        share = self.share_gpu
        return Job(Launch(folder, flags, STAGES, 1, max_restarts, spares, share_gpu=share))

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


def reserved(memory: Path) -> int:
    """Bytes of everything in host memory."""
    return sum(path.stat().st_size for path in memory.rglob('*') if path.is_file())


def logged_bytes(flags: Sequence[str]) -> int:
    """Bytes that all stages log in one iteration of a job with these flags."""
    job = parse_megatron_flags(flags).training(None, STAGES)
    setting = job.model, job.layout, job.batch, job.precision
    return sum(logged_per_iteration(*setting, stage).iteration_bytes for stage in range(STAGES))


def kill_after(job: Job, iteration: int) -> float:
    """SIGKILL the victim once an iteration is logged; returns when (seconds since the epoch).

    Raises:
        LabError: the job ended before.
    """
    for log in job.follow(f'iteration {iteration}'):
        if log.iterations and log.iterations[-1].number >= iteration:
            return job.send([VICTIM], SIGKILL)
    raise LabError(f'the job ended before iteration {iteration}', job.tail())


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.localized',
        description=__doc__,
    )
    add = parser.add_argument
    add('--rounds', type=int, default=2, help='turns of everything (default: 2)')
    add('--iterations', type=int, default=12, help='of a run for overhead (default: 12)')
    add('--window', type=int, default=4, help='iterations per window (default: 4)')
    add('--longest-interval', type=int, default=20, help='of torch_dist (default: 20)')
    add('--output', type=Path, default=Path('runs/bench'), help='folder for logs')
    add('--json', type=Path, metavar='FILE', help='write everything here')
    add_share_gpu(parser)
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


def measure(args: argparse.Namespace, console: Console) -> LocalizedReport:
    """All rounds.

    Raises:
        LabError: a run failed.
    """
    hardware = Hardware.here(gpu=args.share_gpu)
    output = args.output.resolve() / 'localized'
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    data = prepare_text(args.output.resolve() / 'data')
    bench = Bench(data, output, args.window, args.iterations, args.share_gpu)
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
    rounds: list[dict[str, Comeback]] = []
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
    return run_benchmark(
        'bench_localized',
        lambda console: measure(args, console),
        print_report,
        args.json,
        passed=lambda report: report.exact,
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
