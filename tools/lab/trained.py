# SPDX-License-Identifier: Apache-2.0
"""Runs a job to its end, with or without faults, and compares its final state."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from moevement_ext.events import Event, WorkerStarted

from .digests import StateDigest, kinds_of_difference, read_digest
from .evidence import Recovery, kind_of, recovery
from .job import Job
from .launch import Launch, Launcher
from .run_log import RunLog
from .torchrun import Agents

DIGEST = 'digest.json'
"""Name of the file with the digest of the final state, in the folder of a job."""


class Trained(NamedTuple):
    """A finished job."""

    log: RunLog
    state: StateDigest
    events: list[Event]
    hurt_at: float | None = None
    """Time of the last fault (seconds since the epoch), if any."""
    recovery: Recovery | None = None
    """The recovery from the last fault."""

    def different(self, reference: 'Trained') -> list[str]:
        """Kinds of state that differ from another job's."""
        return kinds_of_difference(reference.state, self.state)


def train(
    launch: Launch,
    hurt: Callable[[Job], float | None] | None = None,
    launcher: Launcher | Callable[[Launch], Agents] = Launcher.LOCAL,
    memory: Path | None = None,
) -> Trained:
    """Run a job to its end.

    Args:
        launch: parameters of the job; the flag for the digest is added.
        hurt: called after the start; returns the time of the last fault.
        launcher: the program that starts the workers, or makes their agents.
        memory: host memory of the run, all nodes; required for faults that lose memory.
    """
    digest = launch.folder / DIGEST
    flags = [*launch.flags, '--sparse-ckpt-digest', str(digest)]
    with Job(launch._replace(flags=flags), launcher, memory) as job:
        hurt_at = None if hurt is None else hurt(job)
        log, events = job.finish(), job.events()
        found = None
        if hurt_at is not None:
            found = recovery(events, newest_pids(events), hurt_at, log.iterations)
    return Trained(log, read_digest(digest), events, hurt_at, found)


def newest_pids(events: Iterable[Event]) -> list[int]:
    """Process id of each rank's last worker; torchrun's agents know only running workers."""
    pids = {event.rank: event.pid for event in kind_of(events, WorkerStarted)}
    return [pid for _, pid in sorted(pids.items())]
