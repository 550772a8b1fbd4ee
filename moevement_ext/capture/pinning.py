# SPDX-License-Identifier: Apache-2.0
"""Window files as tensors; with CUDA their pages are pinned once, so copies are asynchronous."""

import weakref

import numpy as np
import torch

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.window_file import WindowFile

_registered: 'weakref.WeakSet[WindowFile]' = weakref.WeakSet()


def pin(file: WindowFile) -> None:
    """Register the pages of `file` with CUDA, once; without CUDA nothing happens.

    Raises:
        SparseCheckpointError: the pages cannot be locked.
    """
    if torch.cuda.is_available() and file not in _registered:
        _register(file)


def payload_tensor(file: WindowFile, view: np.ndarray) -> torch.Tensor:
    """A flat uint8 tensor over `view`, a part of `file`, which is pinned if it was not yet."""
    pin(file)
    return torch.from_numpy(view)


def _register(file: WindowFile) -> None:
    pointer = file.array.ctypes.data
    status = torch.cuda.cudart().cudaHostRegister(pointer, file.capacity, 0)
    if int(status) != 0:
        raise SparseCheckpointError(
            f'{file.path} cannot be registered as pinned memory (CUDA error {int(status)}). '
            'Raise the limit on locked memory (ulimit -l unlimited).'
        )
    _registered.add(file)
    # Another file may be mapped to the same pages once this one is gone.
    weakref.finalize(file, torch.cuda.cudart().cudaHostUnregister, pointer).atexit = False
