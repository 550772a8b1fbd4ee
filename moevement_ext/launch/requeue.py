# SPDX-License-Identifier: Apache-2.0
"""Requeues a Slurm job when a node is missing and no spare node is left."""

import os
from collections.abc import Callable, Sequence

from moevement_ext.events import Event
from moevement_ext.launch.allocation import requeue, unnamed_run_id, wait_until_noticed
from moevement_ext.launch.launcher_events import (
    NodeLost,
    NodeMissing,
    NodeReady,
    RanksNeeded,
    WorkerLaunched,
)
from moevement_ext.launch.output import say_of_launcher

# Limit of Slurm's restart count for a job that has started no worker.
_MOST_RESTARTS = 10


class History:
    """State of a job that decides about a requeue.

    `lost` are hosts without an agent, or with an unusable device; `has_begun` once a worker
    started. `needed` is the number of ranks that the job needs to go on, if
    it has ended for that.
    """

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.has_begun = False
        self.needed: int | None = None

    def note(self, event: Event) -> None:
        match event:
            case NodeLost(host) | NodeMissing(host):
                self.lost.add(host)
            case NodeReady(host):
                self.lost.discard(host)
            case WorkerLaunched():
                self.has_begun = True
            case RanksNeeded(ranks):
                self.needed = ranks


def go_back(history: History, nodes_of: Callable[[int], int], flags: Sequence[str] = ()) -> None:
    """Requeue this job, unless too many requeues started no worker.

    Args:
        history: of the job.
        nodes_of: number of nodes, spare ones included, for a number of ranks.
        flags: of the program.
    """
    job = os.environ['SLURM_JOB_ID']
    run_id = unnamed_run_id(flags)
    restarts = int(os.environ.get('SLURM_RESTART_COUNT', '0'))
    hosts = ','.join(sorted(history.lost))
    if not history.has_begun and restarts >= _MOST_RESTARTS:
        say_of_launcher(
            f'Slurm has restarted the job {restarts} times, and again no worker could be started: '
            f'it does not go back to the queue. Repair {hosts}, or submit it with '
            f'--exclude={hosts}.'
        )
        return
    say_of_launcher('the job goes back to the queue of Slurm')
    sound = wait_until_noticed(job, history.lost)
    if sound:
        say_of_launcher(
            f'it does not get {",".join(sorted(sound))} again, which Slurm takes for sound; once '
            f'repaired: scontrol update JobId={job} ExcNodeList='
        )
    nodes = None
    if history.needed is not None:
        nodes = nodes_of(history.needed)
        say_of_launcher(
            f'it waits there for {nodes} nodes; to start it with other numbers: '
            f'scontrol update JobId={job} NumNodes=MIN-MAX'
        )
    if not requeue(job, sound, nodes):
        named = '' if run_id is None else f' and --sparse-ckpt-run-id {run_id}'
        say_of_launcher(
            f'Slurm did not take it back: scontrol requeue {job} failed. Submit the job again with '
            f'the same flags{named}: it finds its windows.'
        )
