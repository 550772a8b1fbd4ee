# SPDX-License-Identifier: Apache-2.0
"""Pins mapped files, so that CUDA copies to them asynchronously."""

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
    """A file that stays mapped for the lifetime of the object: window file or upstream log."""

    path: Path
    array: npt.NDArray[np.uint8]


_pinned: weakref.WeakSet[MappedFile] = weakref.WeakSet()


def pin(file: MappedFile) -> None:
    """Register the pages of `file` with CUDA for the lifetime of the object.

    The training thread calls this once per file before iteration 1; some GB take a second.

    Raises:
        HostMemoryError: the driver cannot lock this much memory.
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
    # The next file may be mapped at the same address once this one is gone.
    weakref.finalize(file, torch.cuda.cudart().cudaHostUnregister, pointer).atexit = False
    _pinned.add(file)


def pin_like(other: MappedFile, file: MappedFile) -> None:
    """Register a new file if `other` is registered; a failure only makes copies slower.

    Runs on any thread whose device is set.
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
    """Clear CUDA's status of a failed call, which the next kernel launch would raise."""
    with suppress(RuntimeError):
        torch.zeros(1, device='cuda')
