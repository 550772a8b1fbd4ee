# SPDX-License-Identifier: Apache-2.0
"""Measures copies from one GPU to host memory, and what they hold up; no part of the product.

    python -m tools.gpu_check.copy_probe <directory in a tmpfs> gpu|cpu <bytes> <file for figures>

On the CPU the same code runs, only nothing is pinned and nothing overlaps. It must be a process of
its own: CUDA reads the number of connections when it begins.
"""

import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from megatron.moevement.seams import cpu_device
from tools.lab.figures import write_json

_GIB, _MIB = 1 << 30, 1 << 20
_PIECE, _SMALL_PIECE = 32 * _MIB, _MIB
_OUTSTANDING = 2
"""Pieces under way when bulk copies are paced."""
_ALONE = 300
"""Samples of a latency with nothing beside."""
_BUSY_CYCLES = 10**9
"""Keep a stream busy for about half a second."""
Pair = tuple[torch.Tensor, torch.Tensor]


def _now() -> float:
    return time.perf_counter()


class Pages:
    """A mapped file in a tmpfs, registered with CUDA as a window is.

    Args:
        folder: in the tmpfs.
        nbytes: of the file.
        gpu: whether there is a CUDA device to register it with.
    """

    def __init__(self, folder: Path, nbytes: int, gpu: bool) -> None:
        began = _now()
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(file.fileno(), nbytes, flags=flags)
        self.reserve_s = _now() - began
        self.array = np.frombuffer(mapped, np.uint8)
        self._gpu = gpu
        began = _now()
        self.status = self.register()
        self.register_s = _now() - began

    def register(self) -> int:
        """CUDA's answer: 0 if the pages are pinned now; a second time it refuses."""
        if not self._gpu:
            return 0
        address, size = self.array.ctypes.data, self.array.size
        return int(torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def unregister(self) -> None:
        """Before the map goes away."""
        if self._gpu:
            torch.cuda.cudart().cudaHostUnregister(self.array.ctypes.data)


class Probe:
    """Copies of one large tensor, and small work beside them.

    Args:
        pages: where the copies go.
        gpu: False: everything on the CPU.
    """

    def __init__(self, pages: Pages, gpu: bool) -> None:
        self._gpu = gpu
        self._device = torch.device('cuda' if gpu else 'cpu')
        self._target = torch.from_numpy(pages.array)
        self._source = torch.zeros(pages.array.size, dtype=torch.uint8, device=self._device)
        self._side, self._third = torch.cuda.Stream(), torch.cuda.Stream()
        self._one = torch.ones(64, device=self._device)

    # Alone

    def bandwidth(self) -> dict[str, float]:
        """GB/s of one large copy, the best of three."""
        nbytes = min(_GIB, self._source.numel())
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._gpu)
        pageable = torch.empty(nbytes, dtype=torch.uint8)
        pairs = {
            'pinned_gb_s': (pinned, self._source[:nbytes]),
            'registered_gb_s': (self._target[:nbytes], self._source[:nbytes]),
            'pageable_gb_s': (pageable, self._source[:nbytes]),
            'to_device_gb_s': (self._source[:nbytes], pinned),
        }
        return {name: nbytes / self._fastest(pair) / 1e9 for name, pair in pairs.items()}

    def _fastest(self, pair: Pair) -> float:
        def copy() -> float:
            torch.cuda.synchronize()
            began = _now()
            pair[0].copy_(pair[1], non_blocking=True)
            torch.cuda.synchronize()
            return _now() - began

        copy()
        return min(copy() for _ in range(3))

    def kernel_works(self) -> bool:
        """Whether a kernel can be launched, as after a call that CUDA refused."""
        try:
            self._one.add_(0)
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def issue_us(self) -> dict[str, float]:
        """Microseconds of the host for each copy of 1 MiB: one by one, and in one call."""
        pairs = self._pairs(_SMALL_PIECE)
        targets, sources = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

        def one_by_one() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        def together() -> None:
            torch._foreach_copy_(targets, sources, non_blocking=True)

        found = {}
        for name, issue in (('one_by_one', one_by_one), ('together', together)):
            torch.cuda.synchronize()
            began = _now()
            issue()
            found[name] = 1e6 * (_now() - began) / len(pairs)
        torch.cuda.synchronize()
        return found

    def wait_cpu(self, blocking: bool) -> float:
        """CPU seconds per second of waiting for an event."""
        event = torch.cuda.Event(blocking=blocking)
        torch.cuda.synchronize()
        if self._gpu:
            torch.cuda._sleep(_BUSY_CYCLES)
        event.record()
        used, began = time.thread_time(), _now()
        event.synchronize()
        return (time.thread_time() - used) / (_now() - began)

    # Beside bulk copies

    @property
    def _works(self) -> dict[str, Callable[[], object]]:
        return {
            'small_copy': self._small_copy,
            'item': lambda: self._one.sum().item(),
            'launch': lambda: self._one.add_(0),
            'device_sync': self._device_sync,
        }

    def alone(self) -> dict[str, dict[str, float]]:
        """Latencies with nothing beside."""
        torch.cuda.synchronize()
        return {name: _latency(_timed(work, _ALONE)) for name, work in self._works.items()}

    def beside(self, paced: bool, piece: int = _PIECE) -> dict[str, Any]:
        """Latencies of small work while everything is copied on another stream.

        Args:
            paced: a few pieces are under way at a time; else all are queued at once.
            piece: bytes.
        """
        found: dict[str, Any] = {}
        for name, work in self._works.items():
            seconds: list[float] = []
            torch.cuda.synchronize()
            taken: list[float] = []
            thread = threading.Thread(target=self._copy_all, args=(paced, piece, taken))
            thread.start()
            while thread.is_alive():
                seconds += _timed(work, 1)
                if len(seconds) % 256 == 0:  # or launches would pile up
                    torch.cuda.current_stream().synchronize()
            thread.join()
            torch.cuda.synchronize()
            gb_s = self._source.numel() / taken[0] / 1e9
            found[name] = {**_latency(seconds or _timed(work, 1)), 'bulk_gb_s': gb_s}
        return found

    def _copy_all(self, paced: bool, piece: int, taken: list[float]) -> None:
        if self._gpu:
            torch.cuda.set_device(0)
        began = _now()
        issued: list[torch.cuda.Event] = []
        with torch.cuda.stream(self._side):
            for target, source in self._pairs(piece):
                target.copy_(source, non_blocking=True)
                issued.append(torch.cuda.Event(blocking=True))
                issued[-1].record()
                if paced and len(issued) > _OUTSTANDING:
                    issued.pop(0).synchronize()
        issued[-1].synchronize()
        taken.append(_now() - began)

    def _pairs(self, piece: int) -> list[Pair]:
        places = [slice(at, at + piece) for at in range(0, self._source.numel(), piece)]
        return [(self._target[place], self._source[place]) for place in places]

    def _small_copy(self) -> None:
        """Copy one number to the host and wait, like a token dispatcher that needs counts."""
        self._third.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._third):
            self._one.to('cpu', non_blocking=True)
            arrived = self._third.record_event()
        arrived.synchronize()

    def _device_sync(self) -> None:
        self._one.add_(0)
        torch.cuda.synchronize()


def _timed(work: Callable[[], object], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        began = _now()
        work()
        seconds.append(_now() - began)
    return seconds


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1000 * value for value in seconds)
    return {
        'samples': len(ordered),
        'p50_ms': statistics.median(ordered),
        'p99_ms': ordered[int(0.99 * (len(ordered) - 1))],
        'max_ms': ordered[-1],
    }


def longest_gap_ms() -> float:
    """For which a thread that only looks at the clock stands still while another hashes."""
    data = memoryview(np.ones(256 * _MIB, np.uint8))
    gaps: list[float] = []
    thread = threading.Thread(target=lambda: xxhash.xxh3_64_intdigest(data))
    thread.start()
    last = _now()
    while thread.is_alive():
        gaps.append(_now() - last)
        last = _now()
    return 1000 * max(gaps, default=0.0)


def measure(folder: Path, gpu: bool, nbytes: int) -> Iterator[dict[str, Any]]:
    """Everything, figure by figure.

    Args:
        folder: in a tmpfs.
        gpu: whether there is one.
        nbytes: of the large tensor, a multiple of 32 MiB.
    """
    pages = Pages(folder, nbytes, gpu)
    if pages.status:
        sys.exit(f'CUDA refuses to register {nbytes >> 20} MiB in {folder}: error {pages.status}')
    probe = Probe(pages, gpu)
    refused = pages.register()
    yield {
        'reserve_gib_s': nbytes / _GIB / pages.reserve_s,
        'register_gib_s': nbytes / _GIB / pages.register_s,
        'second_registration': refused,
        'kernel_after_failed_registration': probe.kernel_works(),  # reports what CUDA had refused
        'second_kernel_after_it': probe.kernel_works(),
    }
    yield probe.bandwidth()
    yield {'issue_us': probe.issue_us()}
    yield {'spinning_wait_cpu': probe.wait_cpu(blocking=False)}
    yield {'blocking_wait_cpu': probe.wait_cpu(blocking=True)}
    yield {'alone': probe.alone()}
    yield {'queued': probe.beside(paced=False)}
    yield {'paced': probe.beside(paced=True)}
    # More than the driver queues: whoever issues the next copy waits, and others perhaps with it.
    yield {'queue_full': probe.beside(paced=False, piece=_SMALL_PIECE)}
    yield {'hashing_gap_ms': longest_gap_ms()}
    torch.cuda.synchronize()
    pages.unregister()


def main(argv: Sequence[str]) -> None:
    """Measure, and write what there is after each figure."""
    folder, device, nbytes, target = argv
    if device == 'cpu':
        cpu_device.install()
    figures: dict[str, Any] = {}
    for more in measure(Path(folder), device == 'gpu', int(nbytes)):
        figures |= more
        write_json(Path(target), figures)


if __name__ == '__main__':
    main(sys.argv[1:])
