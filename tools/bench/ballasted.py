# SPDX-License-Identifier: Apache-2.0
"""`pretrain_gpt.py` whose workers also map a file in a tmpfs, as they map windows."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np

from megatron.moevement.seams import starting

MOEVEMENT_SPARES = True
VARIABLE = 'MOEVEMENT_BALLAST'
"""Environment variable of a worker: the file."""

if __name__ == '__main__':
    starting.prepare(sys.argv[1:])
    from megatron.moevement.pretrain_gpt import main, warm_up  # noqa: F401 - for a hot spare


def file_in(folder: Path, gigabytes: int) -> Path | None:
    """Write such a file; None if it would be empty."""
    if not gigabytes:
        return None
    path = folder / 'ballast'
    with path.open('wb') as file:
        os.posix_fallocate(file.fileno(), 0, gigabytes * 10**9)
    return path


def _mapped() -> mmap.mmap:
    """Map the file; its pages are in this process's page table, which its death has to clear."""
    with open(os.environ[VARIABLE], 'r+b') as file:
        memory = mmap.mmap(file.fileno(), 0)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
    return memory


if __name__ == '__main__':
    ballast = _mapped()
    main()
