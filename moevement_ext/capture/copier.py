# SPDX-License-Identifier: Apache-2.0
"""Copies slices to host memory on a separate thread (with CUDA, on a separate stream)."""

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

from moevement_ext import faults
from moevement_ext.capture.layout import Piece
from moevement_ext.faults import Phase
from moevement_ext.logger import logger_of
from moevement_ext.memory.device import bind_thread, side_stream, with_index
from moevement_ext.memory.tensors import copy_all
from moevement_ext.rates import CpuCost

logger = logger_of(__name__)

# One piece in copy and one queued: the link is neither idle nor busy for long ahead.
_PIECES_AHEAD = 2


# Slots of the measured rate: several windows, and few enough to follow the link for weeks.
_SLOTS_MEASURED = 32


class _Copied(NamedTuple):
    """Bytes of one slot, and seconds of its copies."""

    nbytes: int
    seconds: float


class Copier:
    """Runs one capture at a time: starts before an iteration, waits before its update.

    The training thread calls `start` and `wait`; a worker thread issues the copies. With CUDA
    the copies run on a side stream that begins after all work queued so far. They run piece by
    piece, so that training's own copies to the host (token counts, norms) do not queue behind a
    whole slot. An event orders the update after the copies, and the training thread waits only
    until the last pieces are *issued*. Sealing (checksums, commit) runs on another thread and
    delays nothing. `cost` counts the CPU time of copies and of sealing, on those threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.cost = CpuCost()
        self._device = with_index(device)
        bound = (self._device,)
        self._copying = ThreadPoolExecutor(
            1, thread_name_prefix='sparse-ckpt-copy', initializer=bind_thread, initargs=bound
        )
        self._sealing = ThreadPoolExecutor(
            1, thread_name_prefix='sparse-ckpt-seal', initializer=bind_thread, initargs=bound
        )
        self._issued: Future[None] | None = None
        # Measurements of the newest slots; the tuple is replaced, never modified.
        self._newest: tuple[_Copied, ...] = ()
        self._cuda = device.type == 'cuda'
        if self._cuda:
            self._stream = side_stream(self._device)
            self._copied = torch.cuda.Event()
            self._stalls: queue.SimpleQueue[float] = queue.SimpleQueue()

    def start(
        self,
        volatile: Sequence[Piece],
        stable: Callable[[], Sequence[Piece]],
        seal: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Begin one capture.

        Args:
            volatile: copied, or queued on the current stream, before this call returns. If a copy
                fails, it raises, no capture begins, and `on_error` is not called.
            stable: returns, on the copying thread, the pieces to copy in the background; no code
                may write to the sources before `wait` returns.
            seal: called on the sealing thread when all copies are done.
            on_error: called once, on a worker thread, if copying or sealing fails; no thread
                writes to the targets afterwards.
        """
        stream = torch.cuda.current_stream(self._device) if self._cuda else None
        try:
            for piece in volatile:
                copy_all(piece.targets, piece.sources, non_blocking=self._cuda)
            ready = None if stream is None else stream.record_event()
            self._issued = self._copying.submit(self._copy, ready, stable, seal, on_error)
        except Exception:
            _let_arrive(stream)
            raise

    def wait(self) -> float:
        """Return once the sources may be written; with CUDA, by work on the current stream only.

        A failed capture was reported to `on_error`; this call does not raise. Returns the
        seconds by which copies delayed training: on the CPU, in this call; with CUDA, the
        stream's waits in all calls, mostly earlier ones, whose end the device has reached
        since the last call.
        """
        if self._issued is None:
            return 0.0
        issued, self._issued = self._issued, None
        if self._cuda:
            return self._wait_on_stream(issued)
        began = time.perf_counter()
        issued.result()
        return time.perf_counter() - began

    def bytes_per_s(self) -> float | None:
        """Rate of the copies of the newest slots in bytes/s; None before the first. Any thread."""
        newest = self._newest
        seconds = sum(one.seconds for one in newest)
        nbytes = sum(one.nbytes for one in newest)
        return nbytes / seconds if nbytes and seconds else None

    def drain(self) -> None:
        self.wait()
        self._copying.submit(lambda: None).result()
        self._sealing.submit(lambda: None).result()

    def stop(self) -> None:
        self._copying.shutdown()
        self._sealing.shutdown()

    # On the copying thread

    def _copy(
        self,
        ready: torch.cuda.Event | None,
        stable: Callable[[], Sequence[Piece]],
        seal: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        try:
            pieces = stable()
            with self.cost.of(sum(piece.nbytes for piece in pieces)):
                if ready is not None:
                    arrive = self._copy_on_stream(pieces, ready)
                else:
                    arrive = self._copy_on_thread(pieces)
            self._sealing.submit(self._seal, arrive, seal, on_error)
        except Exception as error:  # a failed capture must not fail training (invariant I6)
            _let_arrive(self._stream if self._cuda else None)
            _report(on_error, error)

    def _copy_on_thread(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        began = time.perf_counter()
        for piece in pieces:
            self._issue(piece)
        self._count(pieces, time.perf_counter() - began)
        return lambda: None

    def _copy_on_stream(
        self, pieces: Sequence[Piece], ready: torch.cuda.Event
    ) -> Callable[[], None]:
        """Issue the copies; the returned function waits for them on the sealing thread."""
        began, copied = _timing_event(), _timing_event()
        ahead: deque[torch.cuda.Event] = deque()
        # The sources outlive the copies (parameters and optimizer state), so the allocator needs
        # no record_stream.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            began.record()
            for piece in pieces:
                if len(ahead) == _PIECES_AHEAD:
                    ahead.popleft().synchronize()
                self._issue(piece)
                ahead.append(self._stream.record_event(torch.cuda.Event(blocking=True)))
            copied.record()
        self._copied = copied

        def arrive() -> None:
            copied.synchronize()
            self._count(pieces, began.elapsed_time(copied) / 1000)

        return arrive

    def _issue(self, piece: Piece) -> None:
        copy_all(piece.targets, piece.sources, non_blocking=self._cuda)
        faults.point(Phase.CAPTURE)

    def _count(self, pieces: Sequence[Piece], seconds: float) -> None:
        """Count a slot's finished copies; bytes and seconds change together for other threads."""
        copied = _Copied(sum(piece.nbytes for piece in pieces), seconds)
        self._newest = (*self._newest, copied)[-_SLOTS_MEASURED:]

    # On the training thread, with CUDA

    def _wait_on_stream(self, issued: Future[None]) -> float:
        stream = torch.cuda.current_stream(self._device)
        reached, resumed = _timing_event(), _timing_event()
        reached.record(stream)
        issued.result()
        stream.wait_event(self._copied)
        resumed.record(stream)
        self._sealing.submit(self._measure_stall, reached, resumed)
        return self._known_stalls()

    def _known_stalls(self) -> float:
        seconds = 0.0
        while not self._stalls.empty():
            seconds += self._stalls.get()
        return seconds

    # On the sealing thread

    def _measure_stall(self, reached: torch.cuda.Event, resumed: torch.cuda.Event) -> None:
        resumed.synchronize()
        self._stalls.put(reached.elapsed_time(resumed) / 1000)

    def _seal(
        self,
        arrive: Callable[[], None],
        seal: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        try:
            arrive()
            with self.cost.of(0):
                seal()
        except Exception as error:
            _report(on_error, error)


def _let_arrive(stream: torch.cuda.Stream | None) -> None:
    """Wait for issued pieces before their host memory is reused."""
    if stream is not None:
        with suppress(Exception):  # a failed device copies nothing more
            stream.synchronize()


def _report(on_error: Callable[[Exception], None], error: Exception) -> None:
    try:
        on_error(error)
    except Exception:
        logger.exception('a capture failed (%s), and', error)


def _timing_event() -> torch.cuda.Event:
    """An event that a thread waits for without spinning."""
    return torch.cuda.Event(enable_timing=True, blocking=True)
