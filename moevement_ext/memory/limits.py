# SPDX-License-Identifier: Apache-2.0
"""Limits of the container and of the system: memory, cores, threads, open files, locked memory.

The kernel charges tmpfs pages to the cgroup of the process that made them, like its own memory, and
cannot write them out. Over the limit the kernel kills processes. Page cache is charged as well, but
the kernel reclaims it first, so page cache counts as free.

A recovery connects new process groups before the old ones are destroyed, so a rank temporarily has
twice the open files and threads. Checked before iteration 1, with all groups connected.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from moevement_ext.errors import UserError

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

THIS_PROCESS = Path('/proc/self')
SPARES = 'MOEVEMENT_HOT_SPARES'
"""Environment variable of a worker: number of hot spares that its launcher keeps on its node."""


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
    """Message if torchrun's agent, this process's parent, cannot serve the store to all `ranks`.

    Raises the agent's soft limit as far as its hard limit allows.
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
        'systemd, --ulimit nofile= of Docker), or serve the store with moevement '
        'store (--sparse-ckpt-store)'
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


class _MemoryLeft(NamedTuple):
    """Memory left to this process by its tightest limit."""

    nbytes: int
    """Bytes left below the limit; 0 if it is exceeded."""
    cgroup: Path | None
    """Directory of the group that has the limit; None: the limit is the machine's memory."""


class _Version(NamedTuple):
    """File names of a hierarchy, and names of the page cache counters in `memory.stat`."""

    limits: tuple[str, ...]
    used: str
    cache: tuple[str, str]


# Beyond `memory.high` the kernel does not kill processes, but delays every allocation.
_V2 = _Version(('memory.max', 'memory.high'), 'memory.current', ('inactive_file', 'active_file'))
_V1 = _Version(
    ('memory.limit_in_bytes',),
    'memory.usage_in_bytes',
    ('total_inactive_file', 'total_active_file'),  # include the groups below, as the usage does
)


def memory_left(process: Path = THIS_PROCESS) -> _MemoryLeft | None:
    """Memory of the machine left below the limits of this process's cgroup and of its parents.

    Limits that are invisible inside a container do not count, nor does swap. `process` is the
    directory in `/proc` with the groups and their mounts. Returns None if nothing is known.
    """
    found = [
        _MemoryLeft(left, group)
        for version, group in _groups(process, 'memory')
        if (left := _left_in(group, version)) is not None
    ]
    available = _available(process.parent / 'meminfo')
    found += [] if available is None else [_MemoryLeft(available, None)]
    return min(found, key=lambda left: left.nbytes, default=None)


def processes_left(process: Path = THIS_PROCESS) -> int | None:
    """Threads left below the limits, as for `memory_left`; None: no limit."""
    found = (_threads_left(group) for _, group in _groups(process, 'pids'))
    return min((left for left in found if left is not None), default=None)


def cores_left(process: Path = THIS_PROCESS) -> float:
    """Cores that this process may keep busy: those it may run on, within limits as above."""
    found = [_cores(group, version) for version, group in _groups(process, 'cpu')]
    return min([float(len(os.sched_getaffinity(0))), *(cores for cores in found if cores)])


def _groups(process: Path, controller: str) -> Iterator[tuple[_Version, Path]]:
    """The process's groups and their parents in the hierarchies that may limit it."""
    try:
        groups = [line.split(':', 2) for line in (process / 'cgroup').read_text().splitlines()]
        mounts = [line.split() for line in (process / 'mountinfo').read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in groups:
        version = _V2 if (number, controllers) == ('0', '') else _V1
        if version is _V1 and controller not in controllers.split(','):
            continue
        for fields in mounts:
            # id, parent, device, root, mount point, options..., -, type, source, super options
            kind, _, options = fields[fields.index('-') + 1 :][:3]
            of_v1 = kind == 'cgroup' and controller in options.split(',')
            if kind == 'cgroup2' if version is _V2 else of_v1:
                top = Path(fields[4])
                lowest = top / _below(path, fields[3])
                for group in (lowest, *lowest.parents):
                    if group.is_relative_to(top):
                        yield version, group


def _below(path: str, root: str) -> PurePosixPath:
    try:
        return PurePosixPath(path).relative_to(root)
    except ValueError:  # inside a container its own group is the root group
        return PurePosixPath()


def _left_in(group: Path, version: _Version) -> int | None:
    limits = [_limit(group / name) for name in version.limits]
    try:
        limit = min(limit for limit in limits if limit is not None)
        used = int((group / version.used).read_text())
        lines = (group / 'memory.stat').read_text().splitlines()
    except (OSError, ValueError):  # no limit; or the root group, which has no such files
        return None
    figures = dict(line.split() for line in lines)
    cache = sum(int(figures.get(name, 0)) for name in version.cache)
    return max(limit - used + cache, 0)


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # 'max' is no number
        return None


def _available(meminfo: Path) -> int | None:
    """Bytes of RAM that new pages may take; pages of a tmpfs in use are not among them."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith('MemAvailable:'))
    return next((int(kib) * 1024 for kib in found), None)


def _threads_left(group: Path) -> int | None:
    limit, used = (_limit(group / name) for name in ('pids.max', 'pids.current'))
    return None if limit is None or used is None else max(limit - used, 0)


def _cores(group: Path, version: _Version) -> float | None:
    names = ['cpu.max'] if version is _V2 else ['cpu.cfs_quota_us', 'cpu.cfs_period_us']
    try:
        quota, period = ' '.join((group / name).read_text() for name in names).split()
        return int(quota) / int(period) if int(quota) > 0 else None  # 'max', or -1: no limit
    except (OSError, ValueError):
        return None
