# SPDX-License-Identifier: Apache-2.0
"""Checks that the window directory (`--sparse-ckpt-dir`) is in memory."""

import os
from pathlib import Path

import psutil

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_IN_MEMORY = ('tmpfs', 'ramfs')


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

    There the kernel writes the windows out again and again, and training waits for the writes.
    Every rank calls this before it reserves memory.
    """
    if is_in_memory(directory) or os.environ.get('LOCAL_RANK', '0') != '0':
        return
    logger.warning(
        '--sparse-ckpt-dir %s is on %s and should be in a tmpfs: training waits for writes to '
        'it; choose a directory below /dev/shm, or mount a tmpfs.',
        directory,
        file_system_type(directory),
    )
