# SPDX-License-Identifier: Apache-2.0
"""`pretrain_gpt.py` whose workers also have what this machine lacks, as their variables ask.

A *ballast* is a file in a tmpfs that a worker maps, as it maps the windows of a model. An *emulated
device* computes one micro-batch at a time on each node: it takes some seconds, beside the CPU's.
"""

import fcntl
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.moevement.seams import starting

MOEVEMENT_SPARES = True
BALLAST = 'MOEVEMENT_BALLAST'
"""Environment variable of a worker: the file."""
SECONDS, DEVICES = 'MOEVEMENT_DEVICE_S', 'MOEVEMENT_DEVICES'
"""The same: seconds of a micro-batch on a device; folder of the locks of devices."""

if __name__ == '__main__':
    starting.prepare(sys.argv[1:])
    from megatron.moevement import pretrain_gpt
    from megatron.moevement.pretrain_gpt import warm_up  # noqa: F401 - for a hot spare


def file_in(folder: Path, gigabytes: int) -> Path | None:
    """Write a ballast; None if it would be empty."""
    if not gigabytes:
        return None
    path = folder / 'ballast'
    with path.open('wb') as file:
        os.posix_fallocate(file.fileno(), 0, gigabytes * 10**9)
    return path


def _mapped() -> mmap.mmap:
    """Map the file; its pages are in this process's page table, which its death has to clear."""
    with open(os.environ[BALLAST], 'r+b') as file:
        memory = mmap.mmap(file.fileno(), 0)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
    return memory


def _on_device(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    device, seconds = Path(os.environ[DEVICES], os.environ['MOEVEMENT_NODE']), os.environ[SECONDS]

    def step(*args: Any, **named: Any) -> Any:
        with device.open('a') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(float(seconds))  # what is emulated, not a synchronisation
        return forward_step(*args, **named)

    return step


if __name__ == '__main__':
    ballast = _mapped() if BALLAST in os.environ else None
    if DEVICES in os.environ:
        pretrain_gpt.forward_step = _on_device(pretrain_gpt.forward_step)
    pretrain_gpt.main()
