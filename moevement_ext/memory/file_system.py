# SPDX-License-Identifier: Apache-2.0
"""Checks that the window directory (`--sparse-ckpt-dir`) is in memory."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_IN_MEMORY = ('tmpfs', 'ramfs')

GIB = 2**30
NO_SPACE_REMEDY = (
    'Remove what earlier runs left there, mount a larger tmpfs (mount -o remount,size=...), '
    'choose another --sparse-ckpt-dir, or lower --sparse-ckpt-replicas, --sparse-ckpt-window or '
    '--sparse-ckpt-log-lag.'
)
"""Remedy for a full file system of the windows."""


def file_system_type(path: Path) -> str | None:
    """Type, such as 'tmpfs', of the file system of `path`, which may not exist; None: unknown."""
    place = path.resolve()
    types = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((types[parent] for parent in (place, *place.parents) if parent in types), None)


def is_in_memory(path: Path) -> bool:
    """True if files at `path` stay in memory, or if the file system type is unknown."""
    return file_system_type(path) in (*_IN_MEMORY, None)


def warn_unless_in_memory(directory: Path) -> None:
    """Warn once per node if `directory` is on a disk or in a network file system.

    There the kernel writes the windows out again and again, and training waits for that.
    """
    if is_in_memory(directory) or os.environ.get('LOCAL_RANK', '0') != '0':
        return
    logger.warning(
        '--sparse-ckpt-dir %s is on %s and should be in a tmpfs: training waits for writes to '
        'it; choose a directory below /dev/shm, or mount a tmpfs.',
        directory,
        file_system_type(directory),
    )


def gib(nbytes: int) -> str:
    """Format a size in bytes, e.g. `1.50 GiB`."""
    return f'{nbytes / GIB:.2f} GiB' if abs(nbytes) >= GIB // 100 else f'{nbytes} bytes'


def free_bytes(directory: Path) -> int:
    """Free bytes of the file system of `directory`, which need not exist yet."""
    return shutil.disk_usage(existing_parent(directory)).free


def file_system_of(directory: Path) -> str:
    """File system of `directory`, which need not exist yet; unique among those of a host."""
    return str(os.stat(existing_parent(directory)).st_dev)


def existing_parent(directory: Path) -> Path:
    while not directory.exists():
        directory = directory.parent
    return directory


def reserved_bytes(directory: Path) -> int:
    """Bytes that files below `directory` occupy now (0 without such a directory)."""
    return sum(status.st_blocks * 512 for _, status in files_below(directory))


def files_below(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            with suppress(OSError):  # another rank is recycling it, or it belongs to another user
                yield path, os.stat(path)
