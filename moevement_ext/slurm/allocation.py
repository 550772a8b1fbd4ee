# SPDX-License-Identifier: Apache-2.0
"""What Slurm knows of the job: its nodes, and its way back to the queue."""

import subprocess
import time
from collections.abc import Collection

_TO_NOTICE_S = 600.0
"""Slurm itself takes `SlurmdTimeout`, by default five minutes, to notice that a node is lost."""
_POLL_S = 5.0


def hostnames(nodes: str) -> tuple[str, ...]:
    """Names of hosts out of such as `n[1-3]`, in their order."""
    listed = subprocess.run(
        ['scontrol', 'show', 'hostnames', nodes], stdout=subprocess.PIPE, text=True, check=True
    )
    return tuple(listed.stdout.split())


def requeue(job: str, lost: Collection[str]) -> None:
    """Put the job into the queue again, once Slurm has taken the lost nodes out of it.

    Before that it might get them again; and what it had of them, GPUs say, is not given to it anew
    on others (Slurm 22.05: the steps end with "Invalid generic resource"). A controller that does
    not answer, perhaps lost with them, would not put it there at all.

    Args:
        job: its number.
        lost: hosts; Slurm is waited for, but not for ever, as some may not be lost to it.
    """
    deadline = time.monotonic() + _TO_NOTICE_S
    while not _is_noticed(job, lost) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    subprocess.run(['scontrol', 'requeue', job], check=False)


def _is_noticed(job: str, lost: Collection[str]) -> bool:
    """The controller answers, and the job has none of these hosts any more."""
    asked = subprocess.run(
        ['squeue', '--noheader', f'--jobs={job}', '--format=%N'], stdout=subprocess.PIPE, text=True
    )
    nodes = asked.stdout.strip()
    return asked.returncode == 0 and set(lost).isdisjoint(hostnames(nodes) if nodes else ())
