# SPDX-License-Identifier: Apache-2.0
"""The device of this rank: CUDA's driver, the engine's own threads and streams, and pinned files.

CUDA copies to pinned files asynchronously.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory.file_system import gib
from moevement_ext.memory.mapped_file import in_pages

logger = logger_of(__name__)

# CUDA's CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2
_DRIVER = 'libcuda.so.1'


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver library, for calls that torch lacks or makes while holding the GIL.

    Its functions run without the GIL.
    """
    return ctypes.CDLL(_DRIVER)


def with_index(device: torch.device) -> torch.device:
    """The device with its index: a bare `cuda` means another device on another thread.

    Called on the training thread, whose current device is the rank's.
    """
    if device.type == 'cuda' and device.index is None:
        return torch.device('cuda', torch.cuda.current_device())
    return device


def bind_thread(device: torch.device) -> None:
    """Make `device`, from `with_index`, the current device of this thread; no effect for the CPU.

    A new thread starts on GPU 0, and torch returns to GPU 0 after each use of another GPU,
    which costs half a GB there for a context of this process. While the training thread
    captures a CUDA graph, an event query from another thread invalidates the capture, unless
    that thread is in relaxed capture mode.
    """
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def threads_beside(device: torch.device) -> ThreadPoolExecutor:
    """Pool of threads bound to a device, for work beside the set-up. Training thread."""
    return ThreadPoolExecutor(
        thread_name_prefix='sparse-ckpt-set-up',
        initializer=bind_thread,
        initargs=(with_index(device),),
    )


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for copies to host memory that no other part of the job uses.

    torch hands out 32 streams per priority in turn, so a stream of default priority would sooner
    or later be shared with a communicator, which would then wait behind the copies.
    """
    return torch.cuda.Stream(device, priority=-1)


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

    They must have pages, and the file not be registered yet. Any thread whose device is set; some
    GB take a second. Raises `HostMemoryError` if the driver cannot lock this much memory.
    """
    pointer = file.array.ctypes.data
    nbytes = in_pages(file.array.size if nbytes is None else nbytes)
    status = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0))
    if status != 0:
        with suppress(RuntimeError):  # else the next kernel launch would raise CUDA's status
            torch.zeros(1, device='cuda')
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
