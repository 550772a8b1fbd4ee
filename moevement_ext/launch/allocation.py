# SPDX-License-Identifier: Apache-2.0
"""Slurm's view of the job: its nodes, its time limit, and requeueing."""

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Sequence

from moevement_ext.config import ConfigurationError, slurm_run_id
from moevement_ext.events import Event
from moevement_ext.launch.launcher_events import (
    NodeLost,
    NodeMissing,
    NodeReady,
    RanksNeeded,
    WorkerLaunched,
)
from moevement_ext.launch.output import say_of_launcher
from moevement_ext.store import flag

# Twice Slurm's default `SlurmdTimeout` (five minutes), after which it notices a lost node.
_TO_NOTICE_S = 600.0
_POLL_S = 5.0
# Seconds between two readings of the time limit, which may change while the job runs.
_LOOK_S = 60.0
_TRIES = 10
_PAUSE_S = 1.0
# Limit of Slurm's restart count for a job that has started no worker.
_MOST_RESTARTS = 10
_NO_COMMAND = 127


def unnamed_run_id(flags: Sequence[str]) -> str | None:
    """Run id that another job of Slurm must name to find the windows of this one.

    None if the program's `flags` name one, or outside of Slurm.
    """
    return None if flag.given(flags, '--sparse-ckpt-run-id') is not None else slurm_run_id()


def hostnames(nodes: str) -> tuple[str, ...]:
    """Expand a Slurm node list such as `n[1-3]` into host names, in order.

    Raises `ConfigurationError` if `scontrol` is missing, or does not know these nodes.
    """
    asked = _ask('scontrol', 'show', 'hostnames', nodes)
    if asked.returncode != 0:
        raise ConfigurationError(
            f'scontrol show hostnames {nodes} failed ({asked.stderr.strip()}): the launcher needs '
            'the commands of Slurm in PATH, and the SLURM_JOB_NODELIST that Slurm has set.'
        )
    return tuple(asked.stdout.split())


def call_before_end(job: str, before_s: float, call: Callable[[], object]) -> None:
    """Invoke `call` `before_s` seconds before the job's time limit; never without a limit.

    Run this on a separate thread, since Slurm's controller may be slow. While the controller does
    not answer, its last answer is used.
    """
    end = math.inf
    while time.monotonic() < end - before_s:
        left_s = _seconds_left(job)
        if left_s is not None:
            end = time.monotonic() + left_s
        time.sleep(min(max(end - before_s - time.monotonic(), 0.0), _LOOK_S))
    call()


def wait_until_noticed(job: str, lost: Collection[str]) -> set[str]:
    """Wait until Slurm has removed lost nodes from the job, so that the job can be requeued.

    A job requeued earlier may get the lost nodes again, and Slurm 22.05 does not replace their
    resources, such as GPUs (the steps end with "Invalid generic resource"). The wait continues
    while the controller does not answer: it may be lost with the nodes, and could not requeue the
    job.

    Args:
        job: Slurm's job id.
        lost: lost hosts. The wait is bounded, as Slurm may consider some of them healthy.

    Returns:
        The lost hosts that Slurm considers healthy; none if its controller stays silent.
    """
    deadline = time.monotonic() + _TO_NOTICE_S
    while (sound := _still_has(job, lost)) != set() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return sound or set()


def requeue(job: str, excluded: Collection[str], nodes: int | None = None) -> bool:
    """Put the job back into Slurm's queue.

    Args:
        job: Slurm's job id.
        excluded: hosts to exclude, in addition to those of the job's own `--exclude`.
        nodes: number of nodes that the job waits for; None: as submitted.

    Returns:
        False if Slurm has refused, or its controller does not answer.
    """
    hosts = ','.join([*_excluded(job), *sorted(excluded)])
    changes = [f'ExcNodeList={hosts}'] if excluded else []
    changes += [f'NumNodes={nodes}-{nodes}'] if nodes is not None else []
    # Slurm kills all processes of a job that it requeues, this command included.
    if not _insist('scontrol', 'requeue', job, killed=True):
        return False
    if changes:  # Slurm changes these fields of pending jobs only
        _insist('scontrol', 'update', f'JobId={job}', *changes)
    return True


class RequeueState:
    """State of a job that decides about a requeue.

    `lost` are hosts without an agent, or with an unusable device; `has_begun` once a worker
    started. `needed` is the number of ranks that the job needs to continue, if it ended because it
    had fewer.
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


def go_back(state: RequeueState, nodes_of: Callable[[int], int], flags: Sequence[str] = ()) -> None:
    """Requeue this job, unless too many requeues started no worker.

    Args:
        state: of the job.
        nodes_of: number of nodes, spare ones included, for a number of ranks.
        flags: of the program.
    """
    job = os.environ['SLURM_JOB_ID']
    run_id = unnamed_run_id(flags)
    restarts = int(os.environ.get('SLURM_RESTART_COUNT', '0'))
    hosts = ','.join(sorted(state.lost))
    if not state.has_begun and restarts >= _MOST_RESTARTS:
        say_of_launcher(
            f'Slurm has restarted the job {restarts} times, and again no worker could be started: '
            f'it does not go back to the queue. Repair {hosts}, or submit it with '
            f'--exclude={hosts}.'
        )
        return
    say_of_launcher('the job goes back to the queue of Slurm')
    sound = wait_until_noticed(job, state.lost)
    if sound:
        say_of_launcher(
            f'it does not get {",".join(sorted(sound))} again, which Slurm takes for sound; once '
            f'repaired: scontrol update JobId={job} ExcNodeList='
        )
    nodes = None
    if state.needed is not None:
        nodes = nodes_of(state.needed)
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


def _still_has(job: str, lost: Collection[str]) -> set[str] | None:
    asked = _ask('squeue', '--noheader', f'--jobs={job}', '--format=%N')
    if asked.returncode != 0:
        return None
    nodes = asked.stdout.strip()
    return set(lost).intersection(hostnames(nodes) if nodes else ())


def _seconds_left(job: str) -> float | None:
    """Seconds to the job's time limit; infinity without a limit, None if Slurm does not answer."""
    shown = _ask('squeue', '--noheader', f'--jobs={job}', '--format=%L').stdout.strip()
    if shown == 'UNLIMITED':
        return math.inf
    found = re.fullmatch(r'(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)', shown)  # such as 1-02:03:04, 2:03
    if found is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _excluded(job: str) -> list[str]:
    shown = _ask('scontrol', 'show', 'job', job).stdout
    return re.findall(r'\bExcNodeList=([^\s(]+)', shown)


def _insist(*command: str, killed: bool = False) -> bool:
    """Repeat a command until it succeeds, as a failover of Slurm's controller may be in progress.

    Args:
        command: the command.
        killed: a killed command has succeeded.

    Returns:
        False if it fails too often.
    """
    for _ in range(_TRIES):
        code = subprocess.run(command, check=False).returncode
        if code == 0 or (killed and code < 0):
            return True
        time.sleep(_PAUSE_S)
    return False


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # the command does not exist
        return subprocess.CompletedProcess(command, _NO_COMMAND, '', str(error))
