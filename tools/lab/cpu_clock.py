# SPDX-License-Identifier: Apache-2.0
"""CPU time of running processes."""

import contextlib
import time

import numpy as np
import psutil

from tools.lab.job import Job
from tools.lab.run_log import RunLog


class CpuClock:
    """CPU seconds of a job's workers and their children, sampled over time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._workers: list[psutil.Process] = []
        self._times: list[float] = []
        self._seconds: list[float] = []

    def sample(self, log: RunLog) -> None:
        """Take one sample if the job trains; call it often."""
        if not log.iterations:
            return
        if not self._workers:
            self._workers = [psutil.Process(pid) for pid in self._job.pids() if pid]
        self._times.append(time.time())
        self._seconds.append(sum(_with_children(worker) for worker in self._workers))

    def seconds(self, begin: float, end: float) -> float:
        """CPU seconds between two times (seconds since the epoch), interpolated between samples."""
        used = np.interp([begin, end], self._times, np.maximum.accumulate(self._seconds))
        return float(used[1] - used[0])


def _with_children(process: psutil.Process) -> float:
    """CPU seconds of a process, its living children and the children it has reaped."""
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
