# SPDX-License-Identifier: Apache-2.0
"""Mapped files as tensors; with CUDA their pages are pinned once, so copies are asynchronous."""

import logging
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)


class MappedFile(Protocol):
    """A file mapped as a whole for the life of the object: a window file, or the upstream log."""

    path: Path
    array: npt.NDArray[np.uint8]


_registered: 'weakref.WeakSet[MappedFile]' = weakref.WeakSet()


def pin(file: MappedFile) -> None:
    """Register the pages of `file` with CUDA, once; without CUDA nothing happens.

    Where they cannot be locked they are used as they are: copies then hold up training, but are
    right, and training goes on (invariant I6).
    """
    if torch.cuda.is_available() and file not in _registered:
        _register(file)


def payload_tensor(file: MappedFile, view: np.ndarray) -> torch.Tensor:
    """Tensor over a part of a mapped file, which is pinned if it was not yet.

    Args:
        file: the file.
        view: uint8, shape [bytes], a view of `file.array`.

    Returns:
        uint8 on the CPU, shape [bytes], of the same memory.
    """
    pin(file)
    return torch.from_numpy(view)


def _register(file: MappedFile) -> None:
    pointer = file.array.ctypes.data
    status = torch.cuda.cudart().cudaHostRegister(pointer, file.array.size, 0)
    _registered.add(file)  # also if it failed: it is not tried, and not reported, again
    if int(status) != 0:
        _clear_error()
        logger.warning(
            'sparse checkpointing: %s cannot be registered as pinned memory (CUDA error %d): '
            'copies to it hold up training. Raise the limit on locked memory: ulimit -l unlimited.',
            file.path,
            int(status),
        )
        return
    # Another file may be mapped to the same pages once this one is gone.
    weakref.finalize(file, torch.cuda.cudart().cudaHostUnregister, pointer).atexit = False


def _clear_error() -> None:
    """CUDA keeps the status of a failed call, and the next kernel launch would raise it."""
    with suppress(RuntimeError):
        torch.zeros(1, device='cuda')
