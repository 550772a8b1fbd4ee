# SPDX-License-Identifier: Apache-2.0
"""What moving bytes costs of the cores of a node, as measured on the threads that do it."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

# Pieces of work that count: some windows, so that it follows the machine and is no chance.
_NEWEST = 32


class CpuCost:
    """CPU seconds that one kind of work takes for a byte. Any thread.

    What a thread waits costs nothing. Threads that the work starts itself (OpenMP's, with
    OMP_NUM_THREADS above 1) are not seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: deque[tuple[int, float]] = deque(maxlen=_NEWEST)

    @contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        """Count the work within, on the thread that does it; what fails does not count.

        Args:
            nbytes: that it moves; 0: of bytes that count elsewhere, as a second pass over them.
        """
        began = time.thread_time()
        yield
        self.add(nbytes, time.thread_time() - began)

    def add(self, nbytes: int, seconds: float) -> None:
        """Count work that is done."""
        with self._lock:
            self._newest.append((nbytes, seconds))

    def s_per_byte(self) -> float:
        """CPU seconds; 0 before the first."""
        with self._lock:
            newest = list(self._newest)
        moved = sum(nbytes for nbytes, _ in newest)
        return sum(seconds for _, seconds in newest) / moved if moved else 0.0
