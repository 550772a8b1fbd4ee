# SPDX-License-Identifier: Apache-2.0
"""Binds a process to the CPUs that are near its GPU, as the kernel tells them.

An agent of a node starts the workers of all its GPUs on all its CPUs. Pages of a window come to lie
at the CPU that touches them first, and a copy from a GPU of the other socket loses a third to a
half of the link. Memory needs no rule of its own: it is taken where the process runs.
"""

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_DEVICES = Path('/sys/bus/pci/devices')


def bind(address: str, devices: Path = _DEVICES) -> set[int] | None:
    """Have the calling thread, and what it starts from now on, run near a device.

    Nothing changes where the kernel tells nothing of it, as in many virtual machines, or where the
    process may use none of those CPUs: what a launcher has bound stays bound.

    Args:
        address: of the device on the bus, such as `0000:1b:00.0`.
        devices: the kernel's folder of devices.

    Returns:
        The CPUs that are left to it; None: nothing changed.
    """
    try:
        near = cpus_in((devices / address / 'local_cpulist').read_text('ascii'))
    except (OSError, ValueError) as error:
        logger.info('the CPUs near GPU %s are not known: %s', address, error)
        return None
    allowed = os.sched_getaffinity(0)
    chosen = near & allowed
    if not chosen or chosen == allowed:
        return None
    os.sched_setaffinity(0, chosen)
    return chosen


def cpus_in(listed: str) -> set[int]:
    """CPUs of a list as the kernel writes it, such as `0-3,8`.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in filter(None, listed.strip().split(',')):
        first, _, last = part.partition('-')
        found.update(range(int(first), int(last or first) + 1))
    return found
