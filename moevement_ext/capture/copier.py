# SPDX-License-Identifier: Apache-2.0
"""Copies slices to host memory on a thread of its own (and, with CUDA, a stream of its own)."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moevement_ext import faults
from moevement_ext.capture.layout import Copy
from moevement_ext.faults import Phase


class Copier:
    """One capture at a time: started before an iteration, waited for before its update.

    The training thread calls `start` and `wait`. The copies are issued by a worker thread; with
    CUDA they run on a side stream that begins after all work queued so far, and the update is
    ordered after them by an event, so the training thread waits only until they are *issued*.
    Sealing (checksums, commit) runs on another thread and delays nothing.

    Args:
        device: where the state lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = ThreadPoolExecutor(1, thread_name_prefix='sparse-ckpt-copy')
        self._sealing = ThreadPoolExecutor(1, thread_name_prefix='sparse-ckpt-seal')
        self._issued: Future[None] | None = None
        self._copied_bytes = 0
        self._copy_s = 0.0
        self._cuda = device.type == 'cuda'
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._copied = torch.cuda.Event()

    def start(
        self,
        volatile: Sequence[Copy],
        stable: Callable[[], Sequence[Copy]],
        seal: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Begin one capture.

        Args:
            volatile: copied, or queued on the present stream, before this call returns.
            stable: gives, on the copying thread, what is copied in the background; the sources must
                not be written before `wait` has returned.
            seal: called on the sealing thread when all copies have arrived.
            on_error: called on a worker thread, once, if copying or sealing fails.
        """
        for copy in volatile:
            copy.target.copy_(copy.source, non_blocking=self._cuda)
        ready = torch.cuda.current_stream(self._device).record_event() if self._cuda else None
        self._issued = self._copying.submit(self._copy, ready, stable, seal, on_error)

    def wait(self) -> float:
        """Return once the sources may be written (in stream order with CUDA).

        Returns:
            Seconds this call held up the training thread.
        """
        if self._issued is None:
            return 0.0
        began = time.perf_counter()
        self._issued.result()
        self._issued = None
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        return time.perf_counter() - began

    def bytes_per_s(self) -> float | None:
        """Measured rate of all copies so far, bytes/s; None before the first."""
        return self._copied_bytes / self._copy_s if self._copied_bytes and self._copy_s else None

    def drain(self) -> None:
        """Return when everything started is copied and sealed."""
        self.wait()
        self._copying.submit(lambda: None).result()
        self._sealing.submit(lambda: None).result()

    def stop(self) -> None:
        """Finish what was started and end the threads."""
        self._copying.shutdown()
        self._sealing.shutdown()

    def _copy(
        self,
        ready: torch.cuda.Event | None,
        stable: Callable[[], Sequence[Copy]],
        seal: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        try:
            copies = stable()
            if ready is not None:
                arrive = self._copy_on_stream(copies, ready)
            else:
                arrive = self._copy_on_thread(copies)
            self._copied_bytes += sum(copy.target.numel() * copy.target.itemsize for copy in copies)
        except Exception as error:  # a failed capture must not fail training (invariant I6)
            on_error(error)
            return
        self._sealing.submit(self._seal, arrive, seal, on_error)

    def _copy_on_thread(self, copies: Sequence[Copy]) -> Callable[[], None]:
        began = time.perf_counter()
        for copy in copies:
            copy.target.copy_(copy.source)
            faults.point(Phase.CAPTURE)
        self._copy_s += time.perf_counter() - began
        return lambda: None

    def _copy_on_stream(
        self, copies: Sequence[Copy], ready: torch.cuda.Event
    ) -> Callable[[], None]:
        """Issue the copies; what is returned waits for them to arrive, on the sealing thread."""
        began = torch.cuda.Event(enable_timing=True)
        copied = torch.cuda.Event(enable_timing=True)
        # The sources outlive the copies (parameters and optimizer state), so the allocator needs
        # no record_stream.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            began.record()
            for copy in copies:
                copy.target.copy_(copy.source, non_blocking=True)
            copied.record()
        self._copied = copied

        def arrive() -> None:
            copied.synchronize()
            self._copy_s += began.elapsed_time(copied) / 1000

        return arrive

    def _seal(
        self,
        arrive: Callable[[], None],
        seal: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        try:
            arrive()
            seal()
        except Exception as error:
            on_error(error)
