# SPDX-License-Identifier: Apache-2.0
"""What Slurm knows of the job: its nodes, its end, and its way back to the queue."""

import math
import re
import subprocess
import time
from collections.abc import Callable, Collection

from moevement_ext.config import ConfigurationError

_TO_NOTICE_S = 600.0
"""Slurm itself takes `SlurmdTimeout`, by default five minutes, to notice that a node is lost."""
_POLL_S = 5.0
_LOOK_S = 60.0
"""The time of a job may be changed while it runs."""
_TRIES = 10
_PAUSE_S = 1.0
_NO_COMMAND = 127


def hostnames(nodes: str) -> tuple[str, ...]:
    """Names of hosts out of such as `n[1-3]`, in their order.

    Raises:
        ConfigurationError: Slurm's command is not there, or does not know them.
    """
    asked = _ask('scontrol', 'show', 'hostnames', nodes)
    if asked.returncode != 0:
        raise ConfigurationError(
            f'scontrol show hostnames {nodes} failed ({asked.stderr.strip()}): the launcher needs '
            'the commands of Slurm in PATH, and the SLURM_JOB_NODELIST that Slurm has set.'
        )
    return tuple(asked.stdout.split())


def call_before_end(job: str, before_s: float, call: Callable[[], object]) -> None:
    """Wait until the time of the job is up in so many seconds, and call then; for ever, if need be.

    On a thread of its own: it may wait for Slurm's controller, and goes by what that said last.
    """
    end = math.inf
    while time.monotonic() < end - before_s:
        left_s = _seconds_left(job)
        if left_s is not None:
            end = time.monotonic() + left_s
        time.sleep(min(max(end - before_s - time.monotonic(), 0.0), _LOOK_S))
    call()


def wait_until_noticed(job: str, lost: Collection[str]) -> set[str]:
    """Give Slurm the time to take lost nodes out of the job, before it goes back to the queue.

    Sooner it might get them again; and what it had of them, GPUs say, is not given to it anew on
    others (Slurm 22.05: the steps end with "Invalid generic resource"). A controller that does not
    answer, perhaps lost with them, would not put it there at all.

    Args:
        job: its number.
        lost: hosts; Slurm is waited for, but not for ever, as some may not be lost to it.

    Returns:
        Those that Slurm takes for sound.
    """
    deadline = time.monotonic() + _TO_NOTICE_S
    while (sound := _still_has(job, lost)) != set() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return sound or set()


def requeue(job: str, excluded: Collection[str]) -> None:
    """Put the job into the queue again.

    Args:
        job: its number.
        excluded: hosts that it is not to get again, besides those that it was submitted without.
    """
    hosts = ','.join([*_excluded(job), *sorted(excluded)])
    subprocess.run(['scontrol', 'requeue', job], check=False)
    if excluded:  # only of a job that waits this can be changed
        _insist('scontrol', 'update', f'JobId={job}', f'ExcNodeList={hosts}')


def _still_has(job: str, lost: Collection[str]) -> set[str] | None:
    """Those of the hosts that the job has; None if the controller does not answer."""
    asked = _ask('squeue', '--noheader', f'--jobs={job}', '--format=%N')
    if asked.returncode != 0:
        return None
    nodes = asked.stdout.strip()
    return set(lost).intersection(hostnames(nodes) if nodes else ())


def _seconds_left(job: str) -> float | None:
    """Until the time of a job is up, without end if it has no limit; None: Slurm does not say."""
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
    """Slurm ends what runs in a job that goes back to the queue, this command, too."""
    for _ in range(_TRIES):
        if subprocess.run(command, check=False).returncode == 0:
            break
        time.sleep(_PAUSE_S)


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # there is no such command
        return subprocess.CompletedProcess(command, _NO_COMMAND, '', str(error))
