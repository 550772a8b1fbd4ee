# SPDX-License-Identifier: Apache-2.0
"""System limits that a recovery may exceed although training does not.

A recovery connects new process groups before the old ones are destroyed, so a rank temporarily has
twice the open files and threads. Checked before iteration 1, with all groups connected.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moevement_ext.errors import UserError
from moevement_ext.memory.cgroup import THIS_PROCESS, processes_left

# A rank that trains over gloo with one other has 130 files open.
_FILES_OF_A_RANK = 256
_FILES_PER_PEER = 8
_FILES = 'raise it to that (ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of Docker)'
# Further files of a recovery: connections to holders of replicas and logs, checkpoints.
_OPENED_BESIDE = 64
# Upper bound of memory that communication libraries lock in a rank with doubled groups.
_LOCKED_BYTES = 2**30
_INFINIBAND = Path('/sys/class/infiniband')
CONNECTIONS_OF_A_RANK = 16
"""Upper bound of a rank's connections to the launcher's store, in a recovery."""
# Other files of an agent of torchrun: pipes and logs of its workers.
_OF_AN_AGENT = 256


def require_files(connected: int) -> None:
    """Raise the limit of open files for connections to so many ranks; `UserError` if it cannot be.

    Before any rank connects, as gloo gives up only after minutes.
    """
    needed = _FILES_OF_A_RANK + _FILES_PER_PEER * connected
    limit = _raised(resource.RLIMIT_NOFILE, needed)
    if limit is not None:
        raise UserError(f'a rank may take {needed} open files, and the limit is {limit}: {_FILES}')


def shortages(ranks: int, locks_memory: bool) -> list[str]:
    """Messages about limits that are too low for a recovery, with remedies.

    Raises soft limits as far as the hard limits allow. `ranks` counts those of this node;
    `locks_memory`: collectives use InfiniBand, if the node has it.
    """
    return [*_files(), *_threads(ranks), *(_locked() if locks_memory else ())]


def shortage_of_agent(ranks: int) -> str | None:
    """Message if torchrun's agent, the parent of this process, cannot serve the store to all ranks.

    Raises the agent's soft limit as far as its hard limit allows. `ranks` counts those of the whole
    job.
    """
    needed = CONNECTIONS_OF_A_RANK * ranks + _OF_AN_AGENT
    limit = None
    with suppress(OSError):  # another user's process
        limit = _raised(resource.RLIMIT_NOFILE, needed, os.getppid())
    if limit is None:
        return None
    return (
        f'the agent of torchrun that serves the store may take {needed} open files, and its limit '
        f'is {limit}: start torchrun on the first node after ulimit -n {needed} (LimitNOFILE= of '
        'systemd, --ulimit nofile= of Docker), or serve the store with python -m '
        'moevement_ext.store (--sparse-ckpt-store)'
    )


def over_infiniband(backend: str) -> bool:
    """True if collectives of this backend lock memory on this node."""
    return backend == 'nccl' and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def _files() -> Iterator[str]:
    needed = 2 * len(os.listdir('/proc/self/fd')) + _OPENED_BESIDE
    limit = _raised(resource.RLIMIT_NOFILE, needed)
    if limit is not None:
        yield (
            f'a recovery may take {needed} open files of each rank, and the limit is {limit}: '
            f'{_FILES}'
        )


def _threads(ranks: int) -> Iterator[str]:
    needed = len(os.listdir(THIS_PROCESS / 'task'))
    left = processes_left(THIS_PROCESS)
    if left is not None and left < ranks * needed:
        yield (
            f'a recovery may take {ranks * needed} more threads on this node, and the control '
            f'group leaves {left}: raise pids.max (--pids-limit of Docker, podPidsLimit of '
            f'Kubernetes, TasksMax= of systemd)'
        )
    limit = _raised(resource.RLIMIT_NPROC, 2 * ranks * needed)
    if limit is not None and os.geteuid() != 0:
        yield (
            f'the ranks of this node may have {2 * ranks * needed} threads in a recovery, and the '
            f'limit of this user is {limit}: raise it (ulimit -u, LimitNPROC= of systemd)'
        )


def _locked() -> Iterator[str]:
    limit = _raised(resource.RLIMIT_MEMLOCK, _LOCKED_BYTES)
    if limit is not None:
        yield (
            f'a recovery registers buffers with InfiniBand again, and only {limit} bytes may be '
            f'locked: ulimit -l unlimited (LimitMEMLOCK= of systemd, --ulimit memlock=-1 of Docker)'
        )


def _raised(kind: int, needed: int, process: int = 0) -> int | None:
    """The hard limit if it is below `needed`; None if the soft limit is, or now is, high enough.

    `process` is a process id, 0 for this process.
    """
    soft, hard = resource.prlimit(process, kind)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    enough = hard == resource.RLIM_INFINITY or hard >= needed
    resource.prlimit(process, kind, (needed if enough else hard, hard))
    return None if enough else hard
