# SPDX-License-Identifier: Apache-2.0
"""What helper threads may take from training: CPU time per byte, measured, and limited rates."""

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

# Number of newest measurements in the average: several windows, to smooth noise yet follow changes.
_NEWEST = 32
# Lower bits of the clock id of a thread, which Linux computes from the thread's id: a thread's
# clock (4) of CPU time (2). `time.pthread_getcpuclockid` may crash for a thread that has ended.
_OF_A_THREAD = 6


class CpuCost:
    """CPU seconds per byte of one kind of work. Any thread.

    Waiting costs nothing. Threads that the work itself starts (OpenMP's, with OMP_NUM_THREADS
    above 1) are not measured.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: deque[tuple[int, float]] = deque(maxlen=_NEWEST)

    @contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        """Measure the work within the context, on the calling thread; failed work does not count.

        `nbytes` is 0 for a second pass over bytes that are counted elsewhere.
        """
        began = time.thread_time()
        yield
        self.add(nbytes, time.thread_time() - began)

    def add(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._newest.append((nbytes, seconds))

    def s_per_byte(self) -> float:
        """Return the recent average of CPU seconds per byte; 0 before the first measurement."""
        with self._lock:
            newest = list(self._newest)
        moved = sum(nbytes for nbytes, _ in newest)
        return sum(seconds for _, seconds in newest) / moved if moved else 0.0


@contextmanager
def timed(figures: object, field: str) -> Iterator[None]:
    """Add the seconds of the context, even of one that fails, to a field of `figures`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        setattr(figures, field, getattr(figures, field) + time.perf_counter() - began)


class OtherWork:
    """CPU time of helper threads for all other work than moving captured bytes.

    One thread uses this. Logging of sent tensors, heartbeats and events also take cores from
    training, with any window.
    """

    def __init__(self) -> None:
        self._before = time.monotonic(), helper_cpu_s(), 0

    def share(self, captured: int, byte_s: float) -> float:
        """CPU seconds per second since the last call.

        `captured` is the number of bytes so far, `byte_s` the CPU seconds of helper threads for
        each, copies included.
        """
        now = time.monotonic(), helper_cpu_s(), captured
        earlier, self._before = self._before, now
        seconds, busy, nbytes = map(operator.sub, now, earlier)
        return max(0.0, busy - nbytes * byte_s) / seconds if seconds else 0.0


def helper_cpu_s() -> float:
    """CPU seconds of this process's live Python threads other than the main thread."""
    helpers = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return sum(_cpu_s(thread.native_id) for thread in helpers)


def _cpu_s(thread: int | None) -> float:
    if thread is None:  # the thread is just starting
        return 0.0
    with suppress(OSError):  # the thread has just ended
        return time.clock_gettime(~thread << 3 | _OF_A_THREAD)
    return 0.0


@dataclass(eq=False)
class TokenBucket:
    """Delays a thread to limit its rate. One thread uses it.

    After any idle time, at most `burst` bytes exceed the rate. `wait` waits the given seconds
    (0 or more) and returns True to end the wait; `clock` returns seconds of a monotonic clock.
    """

    _wait: Callable[[float], object]
    _burst: int = 0
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Time at which all bytes taken so far are within the rate.
        self._paid_at = -float('inf')
        self.held_up = 0
        """Number of waits."""

    def take(self, nbytes: int, bytes_per_s: float | None) -> bool:
        """Wait until the rate (None: no limit) allows `nbytes`; True if `wait` ended the wait."""
        seconds = 0.0
        if bytes_per_s is not None:
            now = self._clock()
            earliest = now - self._burst / bytes_per_s
            self._paid_at = max(self._paid_at, earliest) + nbytes / bytes_per_s
            seconds = max(self._paid_at - now, 0.0)
        self.held_up += seconds > 0
        return bool(self._wait(seconds))
