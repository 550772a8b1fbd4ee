# SPDX-License-Identifier: Apache-2.0
"""Runs one job to its end and reads what it logged."""

import contextlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from rich.console import Console

from tools.demo.failure import DemoError
from tools.demo.job import Job
from tools.plot_run import Iteration, RunLog

STALLED_S = 120
_CAPTURED = re.compile(
    r' sparse ckpt \| window: (?P<window>\d+) \| slot bytes: (?P<bytes>\d+) \| '
    r'exposed \(ms\): (?P<exposed>[\d.]+) \|'
)


class Captured(NamedTuple):
    """What the last rank says of one iteration with sparse checkpointing."""

    window: int
    slot_bytes: int
    exposed_ms: float


def captured(text: str) -> list[Captured]:
    """All lines of sparse checkpointing in a log, in order."""
    return [
        Captured(int(found['window']), int(found['bytes']), float(found['exposed']))
        for found in _CAPTURED.finditer(text)
    ]


def wall_seconds(iterations: list[Iteration], warm_up: int) -> list[float]:
    """Seconds between the log lines of consecutive iterations, hence with every stall of saving.

    Args:
        iterations: of one life of the job, logged one by one.
        warm_up: how many of the first to drop; at least 1, for the first has no predecessor.
    """
    times = [iteration.time for iteration in iterations]
    return [after - before for before, after in zip(times, times[1:], strict=False)][warm_up - 1 :]


def logs(job: Job, poll_s: float) -> Iterator[RunLog]:
    """What a job has logged so far, again and again while it runs.

    Raises:
        DemoError: the job failed or stands still.
    """
    lines, changed = 0, time.monotonic()
    while job.running():
        log = job.read_log()
        if len(log.iterations) != lines:
            lines, changed = len(log.iterations), time.monotonic()
        elif time.monotonic() - changed > STALLED_S:
            raise DemoError(f'no iteration in {STALLED_S} s', job.tail())
        yield log
        time.sleep(poll_s)


class CpuClock:
    """CPU seconds that the workers of a job and their children have used, sampled over time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._workers: list[psutil.Process] = []
        self._times: list[float] = []
        self._seconds: list[float] = []

    def sample(self, log: RunLog) -> None:
        """Take one sample once the job trains; call it often."""
        if not log.iterations:
            return
        if not self._workers:
            self._workers = self._job.workers()
        self._times.append(time.time())
        self._seconds.append(sum(_cpu_seconds(worker) for worker in self._workers))

    def seconds(self, begin: float, end: float) -> float:
        """Used between two times (seconds since the epoch), interpolated between samples."""
        used = np.interp([begin, end], self._times, np.maximum.accumulate(self._seconds))
        return float(used[1] - used[0])


def _cpu_seconds(process: psutil.Process) -> float:
    """Of a process, its living children and those it has waited for."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            spent = member.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in a tmpfs that is gone afterwards.

    Raises:
        DemoError: there is none.
    """
    shm = Path('/dev/shm')
    if not shm.is_dir():
        raise DemoError(f'{shm} is missing; windows are kept in this tmpfs of Linux')
    with tempfile.TemporaryDirectory(
        prefix='moevement-bench-', dir=shm, ignore_cleanup_errors=True
    ) as directory:
        yield Path(directory)


def exit_on_sigterm() -> None:
    """End by an exception, so that jobs are stopped and memory is freed. Main thread only."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def print_failure(console: Console, tool: str, error: DemoError) -> None:
    """Say what went wrong, with the end of the log."""
    if error.tail:
        console.print(error.tail, markup=False, highlight=False, soft_wrap=True)
    console.print(f'{tool}: {error}', style='bold red', markup=False, soft_wrap=True)
