# SPDX-License-Identifier: Apache-2.0
"""Time for which the training thread, or its stream of the GPU, waits for other ranks.

On a CPU an operation blocks the thread, and each wait is timed (see `waits`). On a GPU the thread
only queues operations. Two events around an exchange between stages, or around the reduction of the
gradients, tell how long the stream was held up there; they are read once the device has passed
them, so that nothing ever waits for them.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_GROUP = 'group'


class Waited:
    """Seconds of waits by the rank that was waited for; `group`: several. Training thread only."""

    def __init__(self) -> None:
        self.begin(on_gpu=False)

    def begin(self, on_gpu: bool) -> None:
        """Count from now on, for the calling thread, or for its stream."""
        self._on_gpu = on_gpu
        self._thread = threading.get_ident()
        self._waits_for = _GROUP
        self._seconds: dict[str, float] = defaultdict(float)
        self._passing = deque[tuple[str, torch.cuda.Event, torch.cuda.Event]]()

    @contextmanager
    def waiting_for(self, rank: int | None) -> Iterator[None]:
        """Within the context, operations wait for `rank`; None: for a group."""
        before, self._waits_for = self._waits_for, _GROUP if rank is None else str(rank)
        began = self._event()
        try:
            yield
        finally:
            ended = self._event()
            if began is not None and ended is not None:
                self._passing.append((self._waits_for, began, ended))
            self._waits_for = before

    def timed[T](self, wait: Callable[[], T]) -> T:
        """Call `wait`, which blocks the calling thread, and count its seconds."""
        if self._on_gpu or threading.get_ident() != self._thread:
            return wait()
        began = time.perf_counter()
        try:
            return wait()
        finally:
            self._seconds[self._waits_for] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """Seconds that became known since the last call; never waits for the device."""
        while self._passing and self._passing[0][2].query():
            rank, began, ended = self._passing.popleft()
            self._seconds[rank] += began.elapsed_time(ended) / 1000
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def _event(self) -> torch.cuda.Event | None:
        """An event of the current stream; None on a CPU, and while a graph is recorded."""
        if not self._on_gpu or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


waited = Waited()
"""The waits of this process."""
