# SPDX-License-Identifier: Apache-2.0
"""Threads and streams of ours beside those of training, on the device of this rank."""

import ctypes

import torch

from moevement_ext.memory.cuda_driver import driver

# CUDA's CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2


def with_index(device: torch.device) -> torch.device:
    """The device by its number: `cuda` alone is another one on another thread.

    Called by the training thread, whose current device is that of the rank.
    """
    if device.type == 'cuda' and device.index is None:
        return torch.device('cuda', torch.cuda.current_device())
    return device


def bind_thread(device: torch.device) -> None:
    """Make `device` the current one of this thread, on which it does all its work.

    A new thread is on GPU 0. torch goes back to that one after each use of another, which costs
    half a GB there for a context of this process. And where the training thread records a CUDA
    graph, a look at an event from another thread ends that, unless it is said to be meant.

    Args:
        device: `with_index`; nothing happens for the CPU.
    """
    if device.type == 'cuda':
        torch.cuda.set_device(device)
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for copies to host memory, which no other part of the job gets as well.

    torch hands out 32 streams of each priority in turn, so one of the usual priority is shared
    with a communicator sooner or later, which would wait behind the copies.
    """
    return torch.cuda.Stream(device, priority=-1)
