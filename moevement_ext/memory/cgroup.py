# SPDX-License-Identifier: Apache-2.0
"""What the limits of a container leave of the memory, processes and cores of a node.

Pages of a tmpfs are charged to the cgroup of the process that made them, like its own memory, and
they cannot be written out. Over the limit the kernel kills. Page cache is charged as well, but it
is given back first, so it counts as left.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

THIS_PROCESS = Path('/proc/self')


class MemoryLeft(NamedTuple):
    """The tightest limit that this process is under."""

    nbytes: int
    """Left below it; 0 if it is exceeded."""
    cgroup: Path
    """Directory of the group that has it."""


class _Version(NamedTuple):
    """Names of a hierarchy's files, and of what is page cache in `memory.stat`."""

    limit: str
    used: str
    cache: tuple[str, str]


_V2 = _Version('memory.max', 'memory.current', ('inactive_file', 'active_file'))
_V1 = _Version(
    'memory.limit_in_bytes',
    'memory.usage_in_bytes',
    ('total_inactive_file', 'total_active_file'),  # of the groups below, too, as the usage is
)


def memory_left(process: Path = THIS_PROCESS) -> MemoryLeft | None:
    """What is left below the limits of this process's cgroup and of all those above it.

    Limits that a container cannot see from within are not counted.

    Args:
        process: where the system tells in which groups a process is, and where they are mounted.

    Returns:
        None: there is no limit, or the system does not tell.
    """
    found = [
        MemoryLeft(left, group)
        for version, lowest, highest in _hierarchies(process)
        for group in (lowest, *lowest.parents)
        if group.is_relative_to(highest) and (left := _left_in(group, version)) is not None
    ]
    return min(found, default=None)


def processes_left(process: Path = THIS_PROCESS) -> int | None:
    """Threads that may still be started, as for `memory_left`; None: as many as one wants."""
    found = [
        left
        for _, lowest, highest in _hierarchies(process, 'pids')
        for group in (lowest, *lowest.parents)
        if group.is_relative_to(highest) and (left := _threads_left(group)) is not None
    ]
    return min(found, default=None)


def cores_left(process: Path = THIS_PROCESS) -> float:
    """Cores that this process may keep busy: those it may run on, within limits as above."""
    found = [
        cores
        for version, lowest, highest in _hierarchies(process, 'cpu')
        for group in (lowest, *lowest.parents)
        if group.is_relative_to(highest) and (cores := _cores(group, version)) is not None
    ]
    return min([float(len(os.sched_getaffinity(0))), *found])


def _hierarchies(
    process: Path, controller: str = 'memory'
) -> Iterator[tuple[_Version, Path, Path]]:
    """Hierarchies that may limit it: files, the group of the process, and the topmost one."""
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
            if kind == 'cgroup2' if version is _V2 else _is_v1(controller, kind, options):
                top = Path(fields[4])
                yield version, top / _below(path, fields[3]), top


def _is_v1(controller: str, kind: str, options: str) -> bool:
    return kind == 'cgroup' and controller in options.split(',')


def _below(path: str, root: str) -> PurePosixPath:
    """Where a group is below a mount that shows the hierarchy from `root` down."""
    try:
        return PurePosixPath(path).relative_to(root)
    except ValueError:  # a container sees its own group as the topmost one
        return PurePosixPath()


def _left_in(group: Path, version: _Version) -> int | None:
    """Bytes that one group may still take; None if it has no limit."""
    try:
        limit = int((group / version.limit).read_text())
        used = int((group / version.used).read_text())
        lines = (group / 'memory.stat').read_text().splitlines()
    except (OSError, ValueError):  # the topmost group has no files; 'max' is no number
        return None
    figures = dict(line.split() for line in lines)
    cache = sum(int(figures.get(name, 0)) for name in version.cache)
    return max(limit - used + cache, 0)


def _threads_left(group: Path) -> int | None:
    try:
        limit = int((group / 'pids.max').read_text())
        return max(limit - int((group / 'pids.current').read_text()), 0)
    except (OSError, ValueError):
        return None


def _cores(group: Path, version: _Version) -> float | None:
    names = ['cpu.max'] if version is _V2 else ['cpu.cfs_quota_us', 'cpu.cfs_period_us']
    try:
        quota, period = ' '.join((group / name).read_text() for name in names).split()
        return int(quota) / int(period) if int(quota) > 0 else None  # 'max', or -1: no limit
    except (OSError, ValueError):
        return None
