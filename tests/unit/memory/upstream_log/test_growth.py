# SPDX-License-Identifier: Apache-2.0
"""A log that changes its size in training loses no record, at any position of its ring."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.upstream_log import ring as map_module
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.ring import RingMap
from tests.unit.memory.upstream_log.logs import (
    DEADLINE_S,
    DOWN,
    REGION,
    Reports,
    opened,
    region,
    value,
)

REGIONS = 4


def fill(log: UpstreamLog, iterations: range) -> None:
    for iteration in iterations:
        log.append(iteration, DOWN, region(iteration))


def test_log_whose_file_was_removed_keeps_its_records(shm: Path) -> None:
    with opened(shm / 'log', Reports(), REGIONS) as log:
        fill(log, range(REGIONS))
        log.drain()
        log.path.unlink()
        with pytest.raises(FileNotFoundError):
            log.grow(3 * REGIONS * REGION)
        assert [value(log, iteration, DOWN, 0) for iteration in range(REGIONS)] == [0, 1, 2, 3]


@pytest.mark.parametrize('before', [0, 1, 3, 4], ids=lambda n: f'{n} dropped')
def test_growing_log_keeps_its_records_and_takes_more(before: int, shm: Path) -> None:
    reports = Reports()
    with opened(shm / 'log', reports, REGIONS) as log:
        fill(log, range(REGIONS))
        log.drop_until(before - 1)
        fill(log, range(REGIONS, REGIONS + before))
        log.grow(3 * REGIONS * REGION)
        held = range(before, REGIONS + before)
        assert [value(log, iteration, DOWN, 0) for iteration in held] == list(held)
        # Until the ring has wrapped around, it is as large as before.
        log.drop_until(REGIONS + before - 2)
        more = range(REGIONS + before, REGIONS + before + 2 * REGIONS)
        fill(log, more)
        found = [value(log, iteration, DOWN, 0) for iteration in range(more[0] - 1, more.stop)]
        assert found == list(range(more[0] - 1, more.stop))
        assert reports.count() == 0, 'nothing was forgotten'


def test_copy_in_progress_reaches_the_grown_log(shm: Path) -> None:
    reports = Reports()
    with opened(shm / 'log', reports, REGIONS) as log:
        begun = log._begin_copy(region(7), slice(0, REGION))
        log.grow(2 * REGIONS * REGION)
        begun()
        assert torch.equal(torch.from_numpy(log.array[:REGION]), region(7).view(torch.uint8))


def test_grow_never_shrinks_the_log(shm: Path) -> None:
    with opened(shm / 'log', Reports(), REGIONS) as log:
        log.grow(REGION)
        assert log.array.size == REGIONS * REGION == (shm / 'log').stat().st_size


def test_log_without_space_to_grow_stays_unchanged(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, nbytes: int, **others: object) -> None:
        raise HostMemoryError('no room')

    with opened(shm / 'log', Reports(), REGIONS) as log:
        fill(log, range(REGIONS))
        monkeypatch.setattr(map_module, 'map_anew', full)
        with pytest.raises(HostMemoryError, match='no room'):
            log.grow(2 * REGIONS * REGION)
        assert [value(log, iteration, DOWN, 0) for iteration in range(REGIONS)] == [0, 1, 2, 3]
        log.drop_until(0)
        fill(log, range(REGIONS, REGIONS + 1))
        assert value(log, REGIONS, DOWN, 0) == REGIONS


# Shrinking

LARGE = 64
"""Pages of a log that shrinks; a record takes one page."""


def page(value: int) -> torch.Tensor:
    return torch.full((mmap.PAGESIZE // 8,), value, dtype=torch.int64)


@contextmanager
def large(path: Path, reports: Reports) -> Iterator[UpstreamLog]:
    with opened(path, reports, LARGE * mmap.PAGESIZE // REGION) as log:
        yield log


def pages(path: Path) -> int:
    return path.stat().st_blocks * 512 // mmap.PAGESIZE


def test_shrunk_log_releases_pages_and_keeps_records(shm: Path) -> None:
    reports = Reports()
    with large(shm / 'log', reports) as log:
        for iteration in range(50):
            log.append(iteration, DOWN, page(iteration))
        log.drop_until(45)
        log.shrink(8 * mmap.PAGESIZE)
        log.append(50, DOWN, page(50))
        log.drain()
        assert pages(shm / 'log') == LARGE, 'four of the records lie behind it'
        log.drop_until(49)
        for iteration in range(51, 200):
            log.append(iteration, DOWN, page(iteration))
            log.drain()
            held = range(max(50, iteration - 6), iteration + 1)
            assert [value(log, number, DOWN, 0) for number in held] == list(held)
            log.drop_until(iteration - 6)
        assert pages(shm / 'log') == 8 == log.array.size // mmap.PAGESIZE
        assert reports.count() == 0, 'nothing was forgotten'


def test_shrunk_log_can_grow_again(shm: Path) -> None:
    reports = Reports()
    with large(shm / 'log', reports) as log:
        log.shrink(4 * mmap.PAGESIZE)
        for iteration in range(4):
            log.append(iteration, DOWN, page(iteration))
        log.drain()
        assert pages(shm / 'log') == 4
        log.grow(16 * mmap.PAGESIZE)
        assert pages(shm / 'log') == 16
        for iteration in range(4, 16):
            log.append(iteration, DOWN, page(iteration))
        assert [value(log, iteration, DOWN, 0) for iteration in range(16)] == list(range(16))
        assert reports.count() == 0


def test_grow_cancels_a_pending_shrink(shm: Path) -> None:
    with large(shm / 'log', Reports()) as log:
        log.shrink(4 * mmap.PAGESIZE)
        log.grow(8 * mmap.PAGESIZE)
        for iteration in range(8):
            log.append(iteration, DOWN, page(iteration))
        assert [value(log, iteration, DOWN, 0) for iteration in range(8)] == list(range(8))
        assert pages(shm / 'log') == 8


def test_pages_are_released_after_their_readers(shm: Path) -> None:
    """A reader would otherwise find zeros, in pages that are never released."""
    with large(shm / 'log', Reports()) as log:
        for iteration in range(8):
            log.append(iteration, DOWN, page(iteration))
        log.drain()
        former = log._map
        former.readers += 1
        log.drop_until(7)
        log.shrink(4 * mmap.PAGESIZE)
        log.append(8, DOWN, page(8))
        with log._changed:
            assert log._changed.wait_for(lambda: log._map is not former, DEADLINE_S)
        assert pages(shm / 'log') == LARGE
        with log._changed:
            former.readers -= 1
            log._changed.notify_all()
        log.drain()
        assert pages(shm / 'log') == 4


def test_log_with_a_deleted_file_keeps_its_pages(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with large(shm / 'log', Reports()) as log:
        (shm / 'log').unlink()
        log.shrink(4 * mmap.PAGESIZE)
        for iteration in range(4):
            log.append(iteration, DOWN, page(iteration))
        assert [value(log, iteration, DOWN, 0) for iteration in range(4)] == list(range(4))
    assert 'keeps its pages' in caplog.text


def test_pages_that_cannot_be_released_do_not_stop_the_log(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(mapped: RingMap, first: int) -> None:
        raise MemoryError

    monkeypatch.setattr(RingMap, 'give_back', fail)
    with large(shm / 'log', Reports()) as log:
        log.shrink(4 * mmap.PAGESIZE)
        log.append(0, DOWN, page(0))
        drained = threading.Thread(target=log.drain, daemon=True)
        drained.start()
        drained.join(DEADLINE_S)
        assert not drained.is_alive()
        assert value(log, 0, DOWN, 0) == 0
    assert 'MemoryError' in caplog.text
