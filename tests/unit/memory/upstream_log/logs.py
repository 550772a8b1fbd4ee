# SPDX-License-Identifier: Apache-2.0
"""A log under test, its reports, and tensors for it."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import xxhash

from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction, LogKey

CPU = torch.device('cpu')
DEADLINE_S = 20.0
"""Timeout of an event that is due at once."""
REGION = 64
DOWN, UP = Direction.DOWN, Direction.UP


class Reports:
    """Receives the reports of a log; blocks the reporting thread while ``gate`` is unset."""

    def __init__(self) -> None:
        self.queue: queue.Queue[str] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, reason: str) -> None:
        self.queue.put(reason)
        assert self.gate.wait(DEADLINE_S)

    def next(self) -> str:
        return self.queue.get(timeout=DEADLINE_S)

    def count(self) -> int:
        return self.queue.qsize()


@contextmanager
def opened(
    path: Path, reports: Reports, regions: int = 64, max_wait_s: float = 0.0
) -> Iterator[UpstreamLog]:
    log = UpstreamLog(path, regions * REGION, CPU, max_wait_s, reports)
    try:
        yield log
    finally:
        log.close()


@contextmanager
def held_worker(log: UpstreamLog, reports: Reports, iteration: int) -> Iterator[None]:
    """Block the worker: it reports the failure of a tensor without storage."""
    reports.gate.clear()
    log.append(iteration, DOWN, torch.empty(4, device='meta'))
    assert 'has failed' in reports.next()
    try:
        yield
    finally:
        reports.gate.set()


def region(value: int) -> torch.Tensor:
    """A tensor that fills one region of the ring."""
    return torch.full((REGION // 8,), value, dtype=torch.int64)


def value(log: UpstreamLog, iteration: int, direction: Direction, sequence: int) -> int:
    found = log.read(LogKey(iteration, direction, sequence), DEADLINE_S)
    assert found is not None
    logged, data = found
    assert xxhash.xxh3_64_intdigest(data) == logged.checksum
    values = set(np.frombuffer(data, np.int64).tolist())
    assert len(values) == 1
    return int(values.pop())
