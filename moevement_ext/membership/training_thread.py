# SPDX-License-Identifier: Apache-2.0
"""Detects, from another thread, that the training thread stands still.

A process whose training thread is stuck (in a data loader, in a write to a dead file server) still
sends heartbeats, and all other ranks wait for it in their collectives. A rank that waits for others
is not at fault, so each process judges itself: the innermost frame outside Python's standard
library shows whether the thread waits in a process group or in the engine, or is stuck by itself.

A dense checkpoint can take longer than a thread may stand still, and be written by other threads or
processes: as long as this process or its children read or write, the thread is not stuck.
"""

import ctypes
import re
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import psutil
import torch

from moevement_ext import faults
from moevement_ext.memory.device import bind_thread, driver

_SHOWN_FRAMES = 12
_MOST_BETWEEN_CHECKS_S = 2.0
# A thread computes if its CPU time exceeds this share of the time between two probes.
_COMPUTES = 0.05
# Bytes per second; a process writes less than that to its log or to its watchdog.
_MOVES_BYTES = 2**16
_COUNTS = re.compile(r'^(?:[rw]char|read_bytes|write_bytes): (\d+)$', re.MULTILINE)
_LIBRARY = sysconfig.get_path('stdlib')
_PACKAGES = sysconfig.get_path('purelib')
_ROOT = Path(__file__).parents[2]
# Files and directories of code that waits for other ranks, or for a GPU that does. A stall of
# `faults` imitates a hanging data loader, so it does not count as such a wait.
_WAITING_FOR_OTHERS = (
    torch.distributed.distributed_c10d.__file__,
    str(Path(torch.cuda.__file__).parent),
    str(_ROOT / 'moevement_ext'),
    str(_ROOT / 'megatron' / 'moevement'),
)


class Probe(NamedTuple):
    """State of the thread at one probe."""

    still_s: float
    """Seconds for which it has been at the same place of its program without computing or
    transferring."""
    waits_for_others: bool
    """The thread is inside a process group or the engine."""
    same_place_s: float
    """Seconds at the same place, computing or not: a wait for the GPU may poll."""


class TrainingThread:
    """The constructing thread, as seen by another thread.

    The thread counts as moving if two consecutive probes find it at different places of its
    program, or it has computed in between, or its process has read or written; so the training loop
    need not count anything. Constructed when process groups exist, as the rank's GPU is in use by
    then; for the set-up, earlier.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._ident = threading.get_ident()
        self._place: list[tuple[CodeType, int]] = []
        self._clock = time.pthread_getcpuclockid(self._ident)
        self._computed_s = 0.0
        self._bytes: int | None = None
        self._still_s = self._same_place_s = 0.0
        self._probed = time.monotonic()

    @property
    def on_gpu(self) -> bool:
        """True if the thread queues GPU kernels, which may run after it has left a wait."""
        return self._stream is not None

    def probe(self) -> Probe:
        """Probe at the thread; always called by the same other thread."""
        frames = self._frames()
        place = [(frame.f_code, frame.f_lasti) for frame in frames]
        now = time.monotonic()
        # Limited, as the whole process may have been stopped in between.
        between_s = min(now - self._probed, _MOST_BETWEEN_CHECKS_S)
        computed_s = self._computed_until_now()
        computes = computed_s - self._computed_s > _COMPUTES * between_s
        self._computed_s = computed_s
        same = place == self._place
        self._same_place_s = self._same_place_s + between_s if same else 0.0
        moves = not same or computes or self._bytes_move(between_s)
        self._still_s = 0.0 if moves else self._still_s + between_s
        self._place = place
        self._probed = now
        waits = _waits_for_others(frames) or _device_is_busy(self._stream)
        return Probe(self._still_s, waits, self._same_place_s)

    def _computed_until_now(self) -> float:
        """CPU seconds of the thread; an ended thread has no clock, and keeps its last value."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return self._computed_s

    def _bytes_move(self, between_s: float) -> bool:
        """Called only for a thread that stands still, as it takes some ms."""
        before, self._bytes = self._bytes, _bytes_moved()
        return before is not None and self._bytes - before > _MOVES_BYTES * between_s

    def moved(self) -> None:
        """Record progress that the training loop reports. Called from the monitor thread."""
        self._place = []

    def stack(self) -> str:
        return ''.join(
            traceback.format_stack(sys._current_frames().get(self._ident), _SHOWN_FRAMES)
        )

    def _frames(self) -> list[FrameType]:
        """Frames, innermost first; empty if the thread has ended."""
        frames, frame = [], sys._current_frames().get(self._ident)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames


def _bytes_moved() -> int:
    """Bytes read and written by this process and its children: files and pipes, not sockets.

    A call counts when it returns; pages written to a file system count as they are written. Reads
    by the calling thread do not count, as it searches all processes of the node for children.
    """
    try:
        children = psutil.Process().children(recursive=True)
    except (psutil.Error, OSError):  # some nodes hide processes of other users
        children = []
    moved = sum(_counted(child.pid) for child in children)
    return moved + _counted('self') - _counted('thread-self')


def _counted(process: str | int) -> int:
    """0 for a process that has ended, and where the kernel does not count."""
    try:
        return sum(map(int, _COUNTS.findall(Path(f'/proc/{process}/io').read_text())))
    except OSError:
        return 0


def _waits_for_others(frames: list[FrameType]) -> bool:
    for frame in frames:
        file = frame.f_code.co_filename
        if not _of_standard_library(file):
            return file.startswith(_WAITING_FOR_OTHERS) and file != faults.__file__
    return True


def _of_standard_library(file: str) -> bool:
    return file.startswith('<frozen') or (
        file.startswith(_LIBRARY) and not file.startswith(_PACKAGES)
    )


def _device_is_busy(stream: torch.cuda.Stream | None) -> bool:
    """True if the thread may wait for the GPU, which in turn waits for collectives.

    Uses the driver, as torch would hold the GIL during the query, and the driver may not answer
    while the training thread waits in it: then no thread could end that wait.
    """
    if stream is None:
        return False
    try:
        bind_thread(stream.device)
    except RuntimeError:
        return True  # the GPU is lost, which `check_device` detects
    status: int = driver().cuStreamQuery(ctypes.c_void_p(stream.cuda_stream))
    return status != 0  # it is busy, or lost
