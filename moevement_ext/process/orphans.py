# SPDX-License-Identifier: Apache-2.0
"""Processes that a dead worker has left running: writers of dense checkpoints, loader workers.

Upstream's checkpoint writer waits for its parent for ever, several hundred MB each, and would go
on writing beside its successor. A launcher that kills or loses one worker leaves them alone, so
whoever takes the place of a dead rank ends them.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_RUN = 'MOEVEMENT_RUN'
"""Tells processes that a worker starts which run's host memory it uses."""
_SAME_RANK = ('RANK', 'MOEVEMENT_NODE')
_SAME_LAUNCHER = ('MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID')
"""Variables of the launcher; a job that was launched again has others."""


def end_orphans(run: Path) -> list[int]:
    """End what predecessors of this process, of the same rank of the same job, left on this node.

    A predecessor that still lives, and what belongs to it, is left alone: that is its launcher's
    matter. Called once, before this process has children.

    Args:
        run: host memory of the job; a job that is launched again has the same.

    Returns:
        The process ids.
    """
    os.environ[_RUN] = str(run)
    if 'RANK' not in os.environ:
        return []
    family = {process.pid: process for process in _processes_at_this_place()}
    orphans = [
        process
        for process in family.values()
        if process.pid != os.getpid() and _is_orphan(process, family)
    ]
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


def _is_orphan(process: psutil.Process, family: dict[int, psutil.Process]) -> bool:
    """Its parent is neither a worker, of whichever launch, nor who started this process."""
    try:
        parent = process.ppid()
        if parent == os.getppid() or parent in family:
            return False
        # `RANK` alone may stand in the environment of a whole container, process 1 included.
        return 'LOCAL_RANK' not in psutil.Process(parent).environ()
    except psutil.NoSuchProcess:  # the parent, or the process itself
        return bool(process.is_running())
    except psutil.Error:  # the parent is not this user's, so it is no worker
        return True
