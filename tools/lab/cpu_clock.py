# SPDX-License-Identifier: Apache-2.0
"""CPU time of running processes."""

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
    """The first thread of each process, which trains."""

    def __sub__(self, earlier: Self) -> 'Spent':
        return Spent(*(now - before for now, before in zip(self, earlier, strict=True)))


def spent(pids: Sequence[int]) -> Spent:
    training_s = total_s = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            first = Path(f'/proc/{pid}/task/{pid}/schedstat').read_text().split()[0]
            training_s += int(first) / 1e9
            for process in family([psutil.Process(pid)]):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total_s += times.user + times.system
                    total_s += times.children_user + times.children_system
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


class CpuClock:
    """CPU seconds of a job's workers and their children, sampled over time."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._samples: list[Spent] = []

    def sample(self, job: Job, log: RunLog) -> None:
        """Take one sample if the job trains; call it often."""
        if log.iterations:
            self._pids = self._pids or [pid for pid in job.pids() if pid]
            self._samples.append(spent(self._pids))

    def seconds(self, begin: float, end: float) -> float:
        """CPU seconds between two times (seconds since the epoch), interpolated between samples."""
        times, seconds, _ = zip(*self._samples, strict=True)
        used = np.interp([begin, end], times, np.maximum.accumulate(seconds))
        return float(used[1] - used[0])
