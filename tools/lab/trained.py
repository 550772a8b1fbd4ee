# SPDX-License-Identifier: Apache-2.0
"""A job from its launch to the comparison of its final state: undisturbed, or hurt on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from moevement_ext.events import Event
from tools.lab.digests import StateDigest, kinds_of_difference, read_digest
from tools.lab.evidence import Recovery, recovery
from tools.lab.job import Job
from tools.lab.launch import Launch, Launcher
from tools.lab.run_log import RunLog

DIGEST = 'digest.json'
"""File of the final state, in the folder of a job."""


class Trained(NamedTuple):
    """A job that came to its end."""

    log: RunLog
    state: StateDigest
    events: list[Event]
    hurt_at: float | None = None
    """When the last fault was put on it (seconds since the epoch), if any."""
    recovery: Recovery | None = None
    """From that."""

    def different(self, reference: 'Trained') -> list[str]:
        """Kinds of state that are not the same, bit for bit, in another job."""
        return kinds_of_difference(reference.state, self.state)


def train(
    launch: Launch,
    hurt: Callable[[Job], float | None] | None = None,
    launcher: Launcher = Launcher.LOCAL,
    memory: Path | None = None,
) -> Trained:
    """Run a job to its end.

    Args:
        launch: what runs; where the digest goes is added to its flags.
        hurt: called once it has been started; returns when the last fault came.
        launcher: starts the workers.
        memory: host memory of the run, all nodes, if one may be lost.

    Raises:
        LabError: it failed or stands still.
    """
    digest = launch.folder / DIGEST
    flags = [*launch.flags, '--sparse-ckpt-digest', str(digest)]
    with Job(launch._replace(flags=flags), launcher, memory) as job:
        hurt_at = None if hurt is None else hurt(job)
        log, events = job.finish(), job.events()
        found = None
        if hurt_at is not None:
            found = recovery(events, job.pids(), hurt_at, log.iterations)
    return Trained(log, read_digest(digest), events, hurt_at, found)
