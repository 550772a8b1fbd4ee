# SPDX-License-Identifier: Apache-2.0
"""Pages of mapped files that CUDA may copy to while the host does something else."""

import logging
import mmap
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.budget import gib

logger = logging.getLogger(__name__)


class MappedFile(Protocol):
    """A file mapped as a whole for the life of the object: a window file, or the upstream log."""

    path: Path
    array: npt.NDArray[np.uint8]


_pinned: weakref.WeakSet[MappedFile] = weakref.WeakSet()


def pin(file: MappedFile) -> None:
    """Register the pages of `file` with CUDA for the life of the object.

    Called once a file, by the training thread before iteration 1: it takes a second for some GB.

    Raises:
        HostMemoryError: the driver cannot lock so much.
    """
    pointer, nbytes = file.array.ctypes.data, _whole_pages(file.array.size)
    status = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))
    if status != 0:
        _clear_error()
        raise HostMemoryError(
            f'{file.path}: CUDA cannot pin {gib(nbytes)} of host memory (error {status}). Keep '
            'less there (--sparse-ckpt-replicas, --sparse-ckpt-max-window), or raise the memory '
            'limit of the container.'
        )
    # Another file may be mapped to the same pages once this one is gone.
    weakref.finalize(file, torch.cuda.cudart().cudaHostUnregister, pointer).atexit = False
    _pinned.add(file)


def pin_like(other: MappedFile, file: MappedFile) -> None:
    """Register `file`, which is made later, if `other` is; without it copies are slower, no more.

    Any thread whose device is set.
    """
    if other not in _pinned:
        return
    try:
        pin(file)
    except HostMemoryError as error:
        logger.warning('sparse checkpointing: copies to it are slower: %s', error)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _clear_error() -> None:
    """CUDA keeps the status of a failed call, and the next kernel launch would raise it."""
    with suppress(RuntimeError):
        torch.zeros(1, device='cuda')
