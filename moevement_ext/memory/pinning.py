# SPDX-License-Identifier: Apache-2.0
"""Pins mapped files, so that CUDA copies to them asynchronously."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory.budget import gib
from moevement_ext.memory.device import bind_thread
from moevement_ext.memory.mapped import in_pages

logger = logger_of(__name__)


class _MappedFile(Protocol):
    """A file that stays mapped for the lifetime of the object: window file or upstream log."""

    path: Path
    array: npt.NDArray[np.uint8]


class _Registered(NamedTuple):
    nbytes: int
    """Registered bytes from the beginning of the file, in whole pages."""
    end: Callable[[], object]
    """Ends the registration; without effect when called again."""
    device: torch.device
    """Current device of the thread that registered."""


_pinned: weakref.WeakKeyDictionary[_MappedFile, _Registered] = weakref.WeakKeyDictionary()


def pin(file: _MappedFile, nbytes: int | None = None) -> None:
    """Register the first `nbytes` (None: all) of `file` with CUDA for the lifetime of the object.

    Those bytes must have pages, and the file not be registered yet. Any thread whose device is
    set; some GB take a second. Raises `HostMemoryError` if the driver cannot lock this much
    memory.
    """
    pointer = file.array.ctypes.data
    nbytes = in_pages(file.array.size if nbytes is None else nbytes)
    status = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))
    if status != 0:
        _clear_error()
        raise HostMemoryError(
            f'{file.path}: CUDA cannot pin {gib(nbytes)} of host memory (error {status}). Raise '
            'the limit of locked memory (ulimit -l, docker --ulimit memlock=-1), use a shorter '
            '--sparse-ckpt-window, --sparse-ckpt-recovery global (no log), or fewer ranks per node.'
        )
    # The next file may be mapped at the same address once this one is gone.
    end = weakref.finalize(file, torch.cuda.cudart().cudaHostUnregister, pointer)
    end.atexit = False
    device = torch.device('cuda', torch.cuda.current_device())
    _pinned[file] = _Registered(nbytes, end, device)


@contextmanager
def pinned_as_far_as(file: _MappedFile, nbytes: int) -> Iterator[None]:
    """Register the first `nbytes` of a registered file instead; a failure only makes copies slower.

    The bytes must have pages, and no copy to the file may be in progress. Inside the context,
    pages after `nbytes` are not registered and can be freed. Any thread; its device is set.
    """
    registered = _pinned.get(file)
    if registered is None or registered.nbytes == in_pages(nbytes):
        yield
        return
    del _pinned[file]
    bind_thread(registered.device)
    registered.end()
    yield
    _pin_or_warn(file, nbytes)


def pin_like(other: _MappedFile, file: _MappedFile) -> None:
    """Register a new file if `other` is registered; failures slow down copies. Any thread."""
    registered = _pinned.get(other)
    if registered is None:
        return
    bind_thread(registered.device)
    _pin_or_warn(file, None)


def _pin_or_warn(file: _MappedFile, nbytes: int | None) -> None:
    try:
        pin(file, nbytes)
    except HostMemoryError as error:
        logger.warning('copies to it are slower: %s', error)


def _clear_error() -> None:
    """Clear CUDA's status of a failed call, which the next kernel launch would raise."""
    with suppress(RuntimeError):
        torch.zeros(1, device='cuda')
