# SPDX-License-Identifier: Apache-2.0
"""Ends processes that a dead worker left behind: dense checkpoint writers, loader workers.

Upstream's checkpoint writers, with several hundred MB of memory each, wait for their parent
forever, and would continue to write beside their successors. A launcher that kills or loses a
worker does not end these processes, so the replacement of a dead rank ends them.

Processes of the rank's new start are no orphans: a wrapper that the launcher has started and that
runs this process (`nsys profile`, `apptainer exec`, a script), and other children of the wrapper.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

SPARE = 'MOEVEMENT_SPARE'
"""Environment variable of a hot spare, also in `/proc` of the workers that it forks, or name of
memory that they map: see `mark_forks`."""
# Environment variable of a worker's children: the run's host memory directory.
_RUN = 'MOEVEMENT_RUN'
_SAME_RANK = ('RANK', 'MOEVEMENT_NODE')
# The launcher's variables; a relaunched job has different values.
_SAME_LAUNCHER = ('MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID')


def mark_forks() -> mmap.mmap:
    """Mark this process, whose forks will be workers, while the result lives.

    For a process whose environment in `/proc` is that of its launcher.
    """
    fd = os.memfd_create(SPARE)
    os.ftruncate(fd, 1)
    mapped = mmap.mmap(fd, 1)
    os.close(fd)
    return mapped


def find_orphans(run: Path) -> list[psutil.Process]:
    """Find orphans of earlier processes of the same rank of the same job.

    A predecessor that lives under the same launcher, its children, and the parents of this process
    are none. Called once, before this process has children or another store. `run` is the host
    memory directory of the job, the same after a relaunch, in any layout.
    """
    os.environ[_RUN] = str(run)
    if 'RANK' not in os.environ:
        return []
    family = {process.pid: process for process in _processes_at_this_place()}
    own = _OwnAttempt.of(family)
    return [process for process in family.values() if _is_orphan(process, family, own)]


def end_orphans(orphans: Iterable[psutil.Process]) -> None:
    """End these processes. For a stranger to the job, its living workers would be among them."""
    for orphan in orphans:
        try:
            orphan.kill()
        except psutil.Error:  # the process ended by itself
            continue
        logger.warning('ended process %d, left by a dead worker of this rank', orphan.pid)


def _processes_at_this_place() -> Iterator[psutil.Process]:
    """Processes of this user that belong to this rank of this job, from any launcher."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()  # first: the quickest look, at all processes
            same_job = environment.get(_RUN) == os.environ[_RUN] or _same(
                environment, _SAME_LAUNCHER
            )
            same_rank = same_job and _same(environment, _SAME_RANK)
            if same_rank and process.uids().real == os.getuid():
                yield process
        except psutil.Error:  # the process is gone, or not accessible
            continue


def _same(environment: Mapping[str, str], names: Iterable[str]) -> bool:
    return all(environment.get(name) == os.environ.get(name) for name in names)


class _OwnAttempt(NamedTuple):
    """The processes of this rank's new start."""

    line: frozenset[int]
    """This process, its ancestors, and the leader of their session."""
    began: float
    """Start time of the first of these processes, in seconds since 1970."""
    launcher: int
    """Process id of the parent of that first process."""

    @classmethod
    def of(cls, family: Mapping[int, psutil.Process]) -> '_OwnAttempt':
        """Find the first process: the oldest ancestor with this rank in its environment.

        A spare or a fork starts before it gets a rank, so none is found; then no process
        counts as younger.
        """
        own = psutil.Process()
        line = [own, *own.parents()]
        in_family = [process for process in line if process.pid in family]
        first = in_family[-1] if in_family else own
        began = first.create_time() if in_family else math.inf
        pids = {os.getsid(0), *(process.pid for process in line)}
        return cls(frozenset(pids), began, first.ppid())


def _is_orphan(
    process: psutil.Process, family: Mapping[int, psutil.Process], own: _OwnAttempt
) -> bool:
    """True if the parent is neither a worker of any launch nor the launcher of this rank."""
    try:
        if process.pid in own.line or process.create_time() >= own.began:
            return False
        parent = process.ppid()
        if parent in family or (parent == own.launcher and _leader_lives(process, own.launcher)):
            return False
        # `RANK` alone may be set for a whole container, process 1 included. `/proc` shows a spare's
        # environment for the workers that it has forked.
        if {'LOCAL_RANK', SPARE} & psutil.Process(parent).environ().keys():
            return False
        return SPARE not in Path(f'/proc/{parent}/maps').read_text()
    except (
        psutil.NoSuchProcess,
        ProcessLookupError,
        FileNotFoundError,
    ):  # the parent, or the process itself
        return bool(process.is_running())
    except psutil.Error:  # the parent is not this user's, so it is no worker
        return True


def _leader_lives(process: psutil.Process, launcher: int) -> bool:
    """False if a launcher that is process 1 of a container has inherited the process.

    Launchers start workers in a group of their own, or in that of the launcher. Linux does not
    reuse the id of a dead leader while its group exists.
    """
    group = os.getpgid(process.pid)
    return group == os.getpgid(launcher) or psutil.pid_exists(group)
