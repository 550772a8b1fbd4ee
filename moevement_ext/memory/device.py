# SPDX-License-Identifier: Apache-2.0
"""The engine's own threads and streams on the device of this rank, and CUDA's driver."""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor

import torch

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
