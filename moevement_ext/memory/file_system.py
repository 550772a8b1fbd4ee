# SPDX-License-Identifier: Apache-2.0
"""Whether the directory of windows is in memory, as `--sparse-ckpt-dir` is meant."""

import logging
import os
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_IN_MEMORY = ('tmpfs', 'ramfs')


def file_system_type(path: Path) -> str | None:
    """Type of the file system that has, or will have, `path`, such as 'tmpfs'.

    Returns:
        None where the system does not tell.
    """
    place = path.resolve()
    types = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((types[parent] for parent in (place, *place.parents) if parent in types), None)


def is_in_memory(path: Path) -> bool:
    """False if what is written to `path` takes no memory for good; true where nothing tells."""
    return file_system_type(path) in (*_IN_MEMORY, None)


def warn_unless_in_memory(directory: Path) -> None:
    """Say in the log, once a node, that `directory` is on a disk or in a network file system.

    That works, but the kernel writes the windows out there again and again, and training waits
    for it. Called by every rank before it reserves memory.
    """
    if is_in_memory(directory) or os.environ.get('LOCAL_RANK', '0') != '0':
        return
    logger.warning(
        '--sparse-ckpt-dir %s is on %s and should be in a tmpfs: training waits for what is '
        'written there; choose a directory below /dev/shm, or mount a tmpfs.',
        directory,
        file_system_type(directory),
    )
