# SPDX-License-Identifier: Apache-2.0
"""Processes that a dead worker has left running: writers of dense checkpoints, loader workers.

Upstream's checkpoint writer waits for its parent for ever, several hundred MB each, and would go
on writing beside its successor. A launcher that kills or loses one worker leaves them alone, so
whoever takes the place of a dead rank ends them.
"""

import logging
import os
from collections.abc import Iterator

import psutil

logger = logging.getLogger(__name__)

_SAME_PLACE = ('RANK', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID', 'MOEVEMENT_NODE')
"""Variables of the launcher that say which rank of which job a process belongs to."""


def end_orphans() -> list[int]:
    """End what predecessors of this process, of the same rank of the same job, left on this node.

    A predecessor that still lives, and what belongs to it, is left alone: that is its launcher's
    matter. Called once, before this process has children; returns the process ids.
    """
    place = {name: os.environ.get(name) for name in _SAME_PLACE}
    if place['RANK'] is None:
        return []
    family = {process.pid: process for process in _processes_at(place)}
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


def _processes_at(place: dict[str, str | None]) -> Iterator[psutil.Process]:
    """Processes of this user with these variables."""
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                environment = process.environ()
                if all(environment.get(name) == value for name, value in place.items()):
                    yield process
        except psutil.Error:  # gone, or not ours to look at
            continue


def _is_orphan(process: psutil.Process, family: dict[int, psutil.Process]) -> bool:
    """Its parent is neither a worker of this rank nor who started this process."""
    try:
        parent = process.ppid()
    except psutil.Error:
        return False
    return parent != os.getppid() and parent not in family
