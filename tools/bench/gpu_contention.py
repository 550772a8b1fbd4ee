# SPDX-License-Identifier: Apache-2.0
"""What else a GPU and its host do takes how long beside a capture: each call is timed."""

import time
from collections.abc import Callable

import msgspec
import torch

_WARM_UP = 50


class Latency(msgspec.Struct, frozen=True):
    """Latency of many calls, in microseconds."""

    calls: int
    median_us: float
    p99_us: float
    max_us: float

    @classmethod
    def of(cls, seconds: list[float]) -> 'Latency':
        """The latency of at least one call."""
        ordered = [1e6 * value for value in sorted(seconds)]
        last = len(ordered) - 1
        return cls(len(ordered), ordered[last // 2], ordered[round(0.99 * last)], ordered[-1])

    def text(self) -> str:
        """The 99th percentile, and the median."""
        return f'{self.p99_us:.0f}  ({self.median_us:.0f})'


class Beside(msgspec.Struct, frozen=True):
    """The same calls with nothing else to do, and while a capture copies."""

    alone: Latency
    beside: Latency

    @property
    def ratio(self) -> float:
        """By how much the 99th percentile is longer beside a capture."""
        return self.beside.p99_us / self.alone.p99_us


class SmallWork:
    """What training asks of the device again and again, and what its host waits for.

    Args:
        device: with the CPU the same calls are made, only nothing is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = torch.ones(64, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == 'cuda' else None

    def copy(self) -> None:
        """Token counts to the host on a stream of their own, as a dispatcher without drops does."""
        if self._stream is None:
            self._counts.clone()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._counts.to('cpu', non_blocking=True)
            arrived = self._stream.record_event()
        arrived.synchronize()

    def launch(self) -> None:
        """A small kernel from Python, which nobody waits for."""
        self._counts.mul_(1)


def latencies(work: Callable[[], None], goes_on: Callable[[], bool]) -> list[float]:
    """Seconds of each call of `work`, one at least, as long as `goes_on`."""
    seconds: list[float] = []
    while not seconds or goes_on():
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def alone(work: Callable[[], None], calls: int) -> list[float]:
    """Seconds of each call with nothing else to do; the first calls are not counted."""
    left = iter(range(_WARM_UP + calls - 1))
    return latencies(work, lambda: next(left, None) is not None)[_WARM_UP:]
