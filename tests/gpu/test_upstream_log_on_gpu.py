# SPDX-License-Identifier: Apache-2.0
"""The upstream log of a GPU: copies on a side stream, and how long tensors are kept."""

import queue
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction, LogKey
from tests.unit.memory.samples import tmpfs_directory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]

ELEMENTS = 2**20
BUSY_CYCLES = 10**9
"""Keeps a stream busy for about half a second: longer than anything the host does meanwhile."""
DEADLINE_S = 30.0
DOWN = Direction.DOWN


@pytest.fixture
def device() -> torch.device:
    return torch.device('cuda', torch.cuda.current_device())


@pytest.fixture
def log(device: torch.device) -> Iterator[UpstreamLog]:
    reports: queue.Queue[str] = queue.Queue()
    with tmpfs_directory() as shm:
        log = UpstreamLog(shm / 'log', 8 * 4 * ELEMENTS, device, 0.0, reports.put)
        yield log
        log.close()
        assert reports.empty()


def values(log: UpstreamLog, sequence: int) -> set[float]:
    found = log.read(LogKey(1, DOWN, sequence), DEADLINE_S)
    assert found is not None
    return set(np.frombuffer(found[1], np.float32).tolist())


def test_the_map_is_pinned(log: UpstreamLog) -> None:
    assert torch.from_numpy(log.array).is_pinned()


def test_append_waits_neither_for_the_device_nor_for_the_copy(
    log: UpstreamLog, device: torch.device
) -> None:
    tensor = torch.zeros(ELEMENTS, device=device)
    torch.cuda._sleep(BUSY_CYCLES)
    tensor.fill_(7)
    log.append(1, DOWN, tensor)
    assert not torch.cuda.current_stream(device).query(), 'the device is still busy'
    assert values(log, 0) == {7.0}, 'the copy came after the kernel that was queued'


def test_memory_is_not_reused_before_it_is_copied(log: UpstreamLog, device: torch.device) -> None:
    """A tensor that is dropped at once would leave its memory to the next one of its size."""
    torch.zeros(ELEMENTS, device=device)  # the block that the allocator would use again
    with torch.cuda.stream(log._stream):
        torch.cuda._sleep(BUSY_CYCLES)
    for value in range(4):
        log.append(1, DOWN, torch.full((ELEMENTS,), float(value), device=device))
    assert [values(log, sequence) for sequence in range(4)] == [{float(v)} for v in range(4)]
    log.drain()
