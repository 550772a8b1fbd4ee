# SPDX-License-Identifier: Apache-2.0
"""A log without room waits for a window to be persisted, or forgets its oldest iterations."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moevement_ext.memory.upstream_log.record import LogGap, LogKey
from tests.unit.memory.upstream_log.logs import (
    DEADLINE_S,
    DOWN,
    UP,
    Reports,
    opened,
    region,
    value,
)


@pytest.fixture
def reports() -> Reports:
    return Reports()


def test_append_waits_for_space(shm: Path, reports: Reports) -> None:
    with opened(shm / 'log', reports, regions=2, max_wait_s=DEADLINE_S) as log:
        log.append(0, DOWN, region(0))
        log.append(1, DOWN, region(1))
        with ThreadPoolExecutor(1) as pool:
            appending = pool.submit(log.append, 2, DOWN, region(2))
            assert 'training waits up to 20 s' in reports.next()
            log.drop_until(0)
            appending.result(DEADLINE_S)
        assert log.first_iteration == 1
        assert [value(log, iteration, DOWN, 0) for iteration in (1, 2)] == [1, 2]
        assert reports.count() == 0


def test_append_does_not_wait_once_a_rank_is_lost(shm: Path, reports: Reports) -> None:
    """The window that would make room comes after the recovery, for which all ranks meet."""
    lost = threading.Event()
    with opened(shm / 'log', reports, regions=2, max_wait_s=1000) as log:
        log.in_vain = lost.is_set
        log.append(0, DOWN, region(0))
        log.append(1, DOWN, region(1))
        with ThreadPoolExecutor(1) as pool:
            appending = pool.submit(log.append, 2, DOWN, region(2))
            assert 'training waits' in reports.next()
            lost.set()
            appending.result(DEADLINE_S)
        assert value(log, 2, DOWN, 0) == 2


def test_oldest_whole_iterations_are_forgotten(shm: Path, reports: Reports) -> None:
    with opened(shm / 'log', reports, regions=5, max_wait_s=0.01) as log:
        for iteration in range(3):
            log.append(iteration, DOWN, region(iteration))
            log.append(iteration, UP, region(-iteration))
        assert 'training waits' in reports.next()
        assert 'iterations before 1 are forgotten' in reports.next()
        assert reports.count() == 0
        assert log.first_iteration == 1
        assert [value(log, i, d, 0) for i in (1, 2) for d in (DOWN, UP)] == [1, -1, 2, -2]
        with pytest.raises(LogGap):
            log.read(LogKey(0, UP, 0), 0)


def test_timed_out_wait_is_repeated_only_after_a_drop(shm: Path, reports: Reports) -> None:
    with opened(shm / 'log', reports, regions=2, max_wait_s=0.01) as log:
        for iteration in range(5):
            log.append(iteration, DOWN, region(iteration))
        seen = [reports.next() for _ in range(2)]  # later losses are not reported again
        assert ['waits' in reason for reason in seen] == [True, False]
        log.drop_until(3)
        log.append(5, DOWN, region(5))
        log.append(6, DOWN, region(6))
        assert 'waits' in reports.next()


def test_append_does_not_wait_for_a_tensor_that_never_fits(shm: Path, reports: Reports) -> None:
    with opened(shm / 'log', reports, regions=4, max_wait_s=1000) as log:
        log.append(2, DOWN, region(2))
        log.append(3, DOWN, region(3).repeat(5))
        assert log.first_iteration == 4
        assert 'forgotten' in reports.next()
        assert reports.count() == 0, 'no report of a wait'


@pytest.mark.parametrize('sizes', [[5], [1, 2, 2], [4, 1]])
def test_too_large_iteration_is_forgotten_at_once(
    shm: Path, reports: Reports, sizes: list[int]
) -> None:
    with opened(shm / 'log', reports, regions=4, max_wait_s=1000) as log:
        for size in sizes:
            log.append(3, DOWN, region(3).repeat(size))
        assert 'iterations before 4 are forgotten' in reports.next()
        assert log.first_iteration == 4
        log.append(3, DOWN, region(3))
        with pytest.raises(LogGap):
            log.read(LogKey(3, DOWN, 0), 0)
        log.append(4, DOWN, region(4))
        assert value(log, 4, DOWN, 0) == 4
        assert reports.count() == 0
