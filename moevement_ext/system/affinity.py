# SPDX-License-Identifier: Apache-2.0
"""Binds a process to the CPUs near its GPU, as the kernel reports them.

A node's agent starts the workers of all GPUs on all CPUs. The kernel places a window's pages near
the CPU that touches them first, and a copy from a GPU of the other socket loses a third to a half
of the bandwidth. Memory needs no binding: the kernel allocates it where the process runs.
"""

import os
from pathlib import Path

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_DEVICES = Path('/sys/bus/pci/devices')


def bind(address: str, devices: Path = _DEVICES) -> set[int] | None:
    """Bind the calling thread, and threads and processes that it starts later, near a device.

    Returns the CPUs; or None, without a change, if the kernel reports no CPUs, as in many virtual
    machines, or the process may use none of them, or only them. A launcher's own binding then
    remains. `address` is a PCI address, such as `0000:1b:00.0`; `devices` the kernel's directory.
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
    """Parse a CPU list of the kernel, such as `0-3,8`; `ValueError` for other text."""
    found: set[int] = set()
    for part in filter(None, listed.strip().split(',')):
        first, _, last = part.partition('-')
        found.update(range(int(first), int(last or first) + 1))
    return found
