# SPDX-License-Identifier: Apache-2.0
"""Processes that a dead worker has left running: writers of dense checkpoints, loader workers.

Upstream's checkpoint writer waits for its parent for ever, several hundred MB each, and would go
on writing beside its successor. A launcher that kills or loses one worker leaves them alone, so
whoever takes the place of a dead rank ends them.

What belongs to the life of the rank that begins now is none of them, whatever it looks like: a
wrapper that the launcher has started and that runs this process (`nsys profile`, `apptainer exec`,
a script), and what that has started beside.
"""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

logger = logging.getLogger(__name__)

# Tells processes that a worker starts which run's host memory it uses.
_RUN = 'MOEVEMENT_RUN'
_SAME_RANK = ('RANK', 'MOEVEMENT_NODE')
# Variables of the launcher; a job that was launched again has others.
_SAME_LAUNCHER = ('MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID')


def end_orphans(run: Path) -> list[int]:
    """End what predecessors of this process, of the same rank of the same job, left on this node.

    A predecessor that still lives, and what belongs to it, is left alone: that is its launcher's
    matter. So is all that runs this process. Called once, before this process has children.

    Args:
        run: host memory of the job; a job that is launched again has the same.

    Returns:
        The process ids.
    """
    os.environ[_RUN] = str(run)
    if 'RANK' not in os.environ:
        return []
    family = {process.pid: process for process in _processes_at_this_place()}
    own = _OwnLife.of(family)
    orphans = [process for process in family.values() if _is_orphan(process, family, own)]
    for orphan in orphans:
        try:
            orphan.kill()
        except psutil.Error:  # it ended by itself
            continue
        logger.warning('ended process %d, left by a dead worker of this rank', orphan.pid)
    return [orphan.pid for orphan in orphans]


def _processes_at_this_place() -> Iterator[psutil.Process]:
    """Processes of this user that belong to this rank of this job, whoever has launched it."""
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                environment = process.environ()
                same_job = environment.get(_RUN) == os.environ[_RUN] or _same(
                    environment, _SAME_LAUNCHER
                )
                if same_job and _same(environment, _SAME_RANK):
                    yield process
        except psutil.Error:  # gone, or not ours to look at
            continue


def _same(environment: Mapping[str, str], names: Iterable[str]) -> bool:
    return all(environment.get(name) == os.environ.get(name) for name in names)


class _OwnLife(NamedTuple):
    """The life of this rank that begins now."""

    line: frozenset[int]
    """This process, those that it descends from, and who leads their session."""
    began: float
    """When its first process was started; none of it is older. (Seconds since 1970.)"""
    launcher: int
    """Who started that."""

    @classmethod
    def of(cls, family: Mapping[int, psutil.Process]) -> '_OwnLife':
        """Its first process is the oldest in the line that has this rank in its environment.

        A spare, or a fork, was there before it was told its rank: then nothing is known to be
        younger than it.
        """
        own = psutil.Process()
        line = [own, *own.parents()]
        in_family = [process for process in line if process.pid in family]
        first = in_family[-1] if in_family else own
        began = first.create_time() if in_family else math.inf
        pids = {os.getsid(0), *(process.pid for process in line)}
        return cls(frozenset(pids), began, first.ppid())


def _is_orphan(
    process: psutil.Process, family: Mapping[int, psutil.Process], own: _OwnLife
) -> bool:
    """Its parent is neither a worker, of whichever launch, nor who started this rank's life."""
    try:
        if process.pid in own.line or process.create_time() >= own.began:
            return False
        parent = process.ppid()
        if parent == own.launcher or parent in family:
            return False
        # `RANK` alone may stand in the environment of a whole container, process 1 included.
        return 'LOCAL_RANK' not in psutil.Process(parent).environ()
    except psutil.NoSuchProcess:  # the parent, or the process itself
        return bool(process.is_running())
    except psutil.Error:  # the parent is not this user's, so it is no worker
        return True
