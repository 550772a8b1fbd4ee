# SPDX-License-Identifier: Apache-2.0
"""The way of a job back to the queue, when a node is missing and no spare one is left."""

import os

from moevement_ext.events import Event
from moevement_ext.launch.allocation import requeue, wait_until_noticed
from moevement_ext.launch.launcher_events import NodeLost, NodeMissing, NodeReady, WorkerLaunched
from moevement_ext.launch.output import say_of_launcher

_MOST_RESTARTS = 10
"""After so many, by Slurm's count, a job of which no worker is started does not go back."""


class History:
    """What of a job's life counts for the next.

    Attributes:
        lost: hosts without an agent, or with a device that cannot be used.
        has_begun: a worker was started.
    """

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.has_begun = False

    def note(self, event: Event) -> None:
        """Take in what happened."""
        match event:
            case NodeLost(host) | NodeMissing(host):
                self.lost.add(host)
            case NodeReady(host):
                self.lost.discard(host)
            case WorkerLaunched():
                self.has_begun = True


def go_back(history: History) -> None:
    """Put this job into the queue again, unless it has been there too often for nothing."""
    job = os.environ['SLURM_JOB_ID']
    restarts = int(os.environ.get('SLURM_RESTART_COUNT', '0'))
    hosts = ','.join(sorted(history.lost))
    if not history.has_begun and restarts >= _MOST_RESTARTS:
        _tell(
            f'Slurm has restarted the job {restarts} times, and again no worker could be started: '
            f'it does not go back to the queue. Mend {hosts}, or submit it with --exclude={hosts}.'
        )
        return
    _tell('the job goes back to the queue of Slurm')
    sound = wait_until_noticed(job, history.lost)
    if sound:
        _tell(
            f'it does not get {",".join(sorted(sound))} again, which Slurm takes for sound; once '
            f'mended: scontrol update JobId={job} ExcNodeList='
        )
    requeue(job, sound)


def _tell(what: str) -> None:
    say_of_launcher(what)
