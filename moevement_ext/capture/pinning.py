# SPDX-License-Identifier: Apache-2.0
"""Mapped files as tensors; with CUDA their pages are pinned once, so copies are asynchronous."""

import weakref
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moevement_ext.errors import SparseCheckpointError


class MappedFile(Protocol):
    """A file mapped as a whole for the life of the object: a window file, or the upstream log."""

    path: Path
    array: npt.NDArray[np.uint8]


_registered: 'weakref.WeakSet[MappedFile]' = weakref.WeakSet()


def pin(file: MappedFile) -> None:
    """Register the pages of `file` with CUDA, once; without CUDA nothing happens.

    Raises:
        SparseCheckpointError: the pages cannot be locked.
    """
    if torch.cuda.is_available() and file not in _registered:
        _register(file)


def payload_tensor(file: MappedFile, view: np.ndarray) -> torch.Tensor:
    """A flat uint8 tensor over `view`, a part of `file`, which is pinned if it was not yet."""
    pin(file)
    return torch.from_numpy(view)


def _register(file: MappedFile) -> None:
    pointer = file.array.ctypes.data
    status = torch.cuda.cudart().cudaHostRegister(pointer, file.array.size, 0)
    if int(status) != 0:
        raise SparseCheckpointError(
            f'{file.path} cannot be registered as pinned memory (CUDA error {int(status)}). '
            'Raise the limit on locked memory (ulimit -l unlimited).'
        )
    _registered.add(file)
    # Another file may be mapped to the same pages once this one is gone.
    weakref.finalize(file, torch.cuda.cudart().cudaHostUnregister, pointer).atexit = False
