# SPDX-License-Identifier: Apache-2.0
"""Slurm's view of the job: its nodes, its time limit, and requeueing."""

import math
import re
import subprocess
import time
from collections.abc import Callable, Collection

from moevement_ext.config import ConfigurationError

# Twice Slurm's default `SlurmdTimeout` (five minutes), after which it notices a lost node.
_TO_NOTICE_S = 600.0
_POLL_S = 5.0
# The time limit of a running job may change.
_LOOK_S = 60.0
_TRIES = 10
_PAUSE_S = 1.0
_NO_COMMAND = 127


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

    Run this on a thread of its own, since Slurm's controller may be slow. While the controller
    does not answer, its last answer is used.
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
    while the controller does not answer, perhaps lost with the nodes, as it could not requeue
    the job. Otherwise it is bounded, as Slurm may consider some lost hosts healthy; returns
    these.
    """
    deadline = time.monotonic() + _TO_NOTICE_S
    while (sound := _still_has(job, lost)) != set() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return sound or set()


def requeue(job: str, excluded: Collection[str]) -> None:
    """Put the job back into Slurm's queue; `excluded` hosts add to the job's own `--exclude`."""
    hosts = ','.join([*_excluded(job), *sorted(excluded)])
    subprocess.run(['scontrol', 'requeue', job], check=False)
    if excluded:  # Slurm changes this of pending jobs only
        _insist('scontrol', 'update', f'JobId={job}', f'ExcNodeList={hosts}')


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


def _insist(*command: str) -> None:
    # Repeated: Slurm kills all processes of a job that it requeues, including this command.
    for _ in range(_TRIES):
        if subprocess.run(command, check=False).returncode == 0:
            break
        time.sleep(_PAUSE_S)


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # the command does not exist
        return subprocess.CompletedProcess(command, _NO_COMMAND, '', str(error))
