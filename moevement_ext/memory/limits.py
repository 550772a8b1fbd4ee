# SPDX-License-Identifier: Apache-2.0
"""System limits that a recovery may exceed although training does not.

A recovery connects new process groups before the old ones are destroyed, so a rank temporarily has
twice the open files and threads. Checked before iteration 1, with all groups connected.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from moevement_ext.memory.cgroup import THIS_PROCESS, processes_left

# Further files of a recovery: connections to holders of replicas and logs, checkpoints.
_OPENED_BESIDE = 64
# Upper bound of memory that communication libraries lock in a rank with doubled groups.
_LOCKED_BYTES = 2**30
_INFINIBAND = Path('/sys/class/infiniband')


def shortages(ranks: int, locks_memory: bool) -> list[str]:
    """Messages about limits that are too low for a recovery, with remedies.

    Raises soft limits as far as the hard limits allow. `ranks` counts those of this node;
    `locks_memory`: collectives use InfiniBand, if the node has it.
    """
    return [*_files(), *_threads(ranks), *(_locked() if locks_memory else ())]


def over_infiniband(backend: str) -> bool:
    """True if collectives of this backend lock memory on this node."""
    return backend == 'nccl' and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def _files() -> Iterator[str]:
    needed = 2 * len(os.listdir('/proc/self/fd')) + _OPENED_BESIDE
    limit = _raised(resource.RLIMIT_NOFILE, needed)
    if limit is not None:
        yield (
            f'a recovery may take {needed} open files of each rank, and the limit is {limit}: '
            f'raise it to that (ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of Docker)'
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


def _raised(kind: int, needed: int) -> int | None:
    """The limit if it stays below `needed`; None if it is or was raised high enough."""
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(kind, (needed, hard))
        return None
    return hard
