# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of running jobs."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import psutil

from .job import Job
from .launch import family
from .run_log import RunLog


class Spent(NamedTuple):
    """CPU seconds since the start of processes."""

    time: float
    """When they were read, in seconds since the epoch."""
    total_s: float
    """All threads, and children."""
    training_s: float
    """The first thread of each worker, which trains."""

    def __sub__(self, earlier: Self) -> 'Spent':
        return Spent(*(now - before for now, before in zip(self, earlier, strict=True)))


def spent(launchers: Sequence[int], workers: Sequence[int] = ()) -> Spent:
    """CPU seconds of the launchers of a job, and of all processes below them."""
    training_s = total_s = 0.0
    for pid in workers:
        with contextlib.suppress(OSError):
            first = Path(f'/proc/{pid}/task/{pid}/schedstat').read_text().split()[0]
            training_s += int(first) / 1e9
    for process in family([psutil.Process(pid) for pid in launchers if psutil.pid_exists(pid)]):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return Spent(time.time(), total_s, training_s)


def memory_bytes(pids: Sequence[int]) -> int:
    """Anonymous memory of processes and their descendants; memory that forks share counts once."""
    total = 0
    for process in family([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]):
        with contextlib.suppress(OSError):
            text = Path(f'/proc/{process.pid}/smaps_rollup').read_text()
            lines = (line.split() for line in text.splitlines() if line.startswith('Pss_Anon:'))
            total += 1024 * sum(int(line[1]) for line in lines)
    return total


def file_bytes(root: Path) -> tuple[int, int]:
    """Bytes of the logs of a run, and of its other files; a file renamed meanwhile is left out."""
    found = {True: 0, False: 0}
    for path in root.rglob('*'):
        try:
            found[path.name == 'upstream-log'] += 512 * path.stat().st_blocks * path.is_file()
        except OSError:
            continue
    return found[True], found[False]


class CpuClock:
    """CPU seconds of all processes of a job, its launchers included, sampled over time."""

    def __init__(self) -> None:
        self._samples: list[Spent] = []

    def sample(self, job: Job, log: RunLog) -> None:
        """Take one sample if the job trains; call it often."""
        if log.iterations:
            self._samples.append(spent(job.launchers()))

    def seconds(self, begin: float, end: float) -> float:
        """CPU seconds between two times (seconds since the epoch), interpolated between samples."""
        times, seconds, _ = zip(*self._samples, strict=True)
        used = np.interp([begin, end], times, np.maximum.accumulate(seconds))
        return float(used[1] - used[0])
