# SPDX-License-Identifier: Apache-2.0
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction, LogGap, LoggedTensor, LogKey
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.memory.upstream_log.logs import (
    CPU,
    DEADLINE_S,
    DOWN,
    REGION,
    UP,
    Reports,
    held_worker,
    opened,
    region,
    value,
)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def log(shm: Path, reports: Reports) -> Iterator[UpstreamLog]:
    with opened(shm / 'log', reports) as log:
        yield log


# ---- appending


@pytest.mark.parametrize('shape', [(4, 2, 8), (), (0, 3), (1,)])
@pytest.mark.parametrize(
    'dtype',
    [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn],
)
def test_every_dtype_and_shape_is_logged(
    log: UpstreamLog, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    source = (torch.randn(shape) * 3).to(dtype)
    log.append(3, UP, source)
    found = log.read(LogKey(3, UP, 0), DEADLINE_S)
    assert found is not None
    logged, data = found
    raw = source.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert data == raw
    name = str(dtype).removeprefix('torch.')
    assert logged == LoggedTensor(name, shape, len(raw), xxhash.xxh3_64_intdigest(raw))


def test_views_and_graph_tensors_are_logged(log: UpstreamLog) -> None:
    weight = torch.arange(12.0).view(3, 4).requires_grad_()
    activation = weight * 2
    log.append(1, DOWN, activation)
    log.append(1, DOWN, activation.t())
    for sequence, expected in enumerate((activation, activation.t())):
        found = log.read(LogKey(1, DOWN, sequence), DEADLINE_S)
        assert found is not None
        assert found[0].shape == expected.shape
        assert found[1] == expected.detach().contiguous().numpy().tobytes()


def test_data_may_be_replaced_right_after_append(log: UpstreamLog, reports: Reports) -> None:
    with held_worker(log, reports, 0):
        sent = region(7)
        log.append(1, DOWN, sent)
        sent.data = torch.zeros(1, dtype=torch.int64)
    assert value(log, 1, DOWN, 0) == 7


class Watched(np.ndarray):
    """The map of a log; `first` is called before each read of a part."""

    first: Callable[[], None]

    def __getitem__(self, key: object) -> object:
        Watched.first()
        return super().__getitem__(key)  # type: ignore[index]


def test_tensor_is_released_before_its_checksum(log: UpstreamLog, reports: Reports) -> None:
    storage = np.ones(8)
    released, seen = weakref.ref(storage), queue.SimpleQueue[bool]()
    Watched.first = lambda: seen.put(released() is None)
    log.array = log.array.view(Watched)
    with held_worker(log, reports, 0):
        log.append(1, DOWN, torch.from_numpy(storage))
        del storage
        assert released() is not None, 'kept until it is copied'
    log.drain()
    assert seen.get(timeout=DEADLINE_S)


def test_first_iteration_is_the_first_logged_one(log: UpstreamLog) -> None:
    assert log.first_iteration is None
    log.drop_until(3)
    assert log.first_iteration is None
    log.append(7, DOWN, region(7))
    log.append(8, DOWN, region(8))
    assert log.first_iteration == 7


def test_going_back_without_rewind_is_an_error(log: UpstreamLog) -> None:
    log.append(7, DOWN, region(7))
    with pytest.raises(ValueError, match='must rewind'):
        log.append(6, DOWN, region(6))


# ---- dropping and rewinding


def test_rewind_before_forgotten_iterations(shm: Path, reports: Reports) -> None:
    with opened(shm / 'log', reports, regions=2) as log:
        for iteration in range(5):
            log.append(iteration, DOWN, region(iteration))
        assert log.first_iteration == 3
        log.rewind(1)
        assert log.first_iteration == 2, 'all of it is computed, and logged, again'
        log.append(2, DOWN, region(2))
        assert value(log, 2, DOWN, 0) == 2


# ---- reading


def test_incomplete_record_is_not_read(log: UpstreamLog, reports: Reports) -> None:
    with held_worker(log, reports, 0):
        log.append(1, DOWN, region(1))
        assert log.read(LogKey(1, DOWN, 0), 0) is None
    assert value(log, 1, DOWN, 0) == 1


def test_missing_record_of_a_past_iteration_raises(log: UpstreamLog) -> None:
    log.append(1, DOWN, region(1))
    log.append(2, DOWN, region(2))
    with pytest.raises(LogGap, match='no tensor 1 sent down in iteration 1; .*schedules'):
        log.read(LogKey(1, DOWN, 1), DEADLINE_S)
    assert log.read(LogKey(2, DOWN, 1), 0) is None, 'this may still come'


def test_reader_of_a_paused_log_raises(log: UpstreamLog) -> None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(log.read, LogKey(1, DOWN, 0), DEADLINE_S)
        log.pause()
        with pytest.raises(LogGap, match='no tensor 0 sent down in iteration 1; .*schedules'):
            reading.result(DEADLINE_S)
    log.append(1, DOWN, region(1))
    assert log.read(LogKey(1, DOWN, 1), 0) is None, 'sending goes on'
    log.pause()
    assert value(log, 1, DOWN, 0) == 1
    log.rewind(1)
    assert log.read(LogKey(1, DOWN, 1), 0) is None, 'it will be sent anew'


def test_drop_wakes_the_reader_of_a_record(log: UpstreamLog) -> None:
    log.append(1, DOWN, region(1))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(log.read, LogKey(1, DOWN, 1), DEADLINE_S)
        log.drop_until(1)
        with pytest.raises(LogGap):
            reading.result(DEADLINE_S)


class Interrupted(np.ndarray):
    """The map of a log; the next copy out of it first calls ``first``, on the same thread."""

    first: Callable[[], None]

    def tobytes(self, order: Literal['A', 'C', 'F', 'K', None] = 'C') -> bytes:
        Interrupted.first()
        return super().tobytes(order)


def test_readers_never_return_overwritten_bytes(shm: Path, reports: Reports) -> None:

    with opened(shm / 'log', reports, regions=1) as log:

        def overwrite() -> None:
            log.append(2, DOWN, region(2))
            log.drain()
            Interrupted.first = lambda: None

        log.append(1, DOWN, region(1))
        log.array = log.array.view(Interrupted)
        Interrupted.first = overwrite
        with pytest.raises(LogGap, match='iteration 1 is gone'):
            log.read(LogKey(1, DOWN, 0), DEADLINE_S)
        assert value(log, 2, DOWN, 0) == 2


# ---- failures


def test_failed_copy_forgets_its_iteration(log: UpstreamLog, reports: Reports) -> None:
    log.append(1, DOWN, region(1))
    log.append(2, DOWN, torch.empty(4, device='meta'))
    log.append(2, DOWN, region(2))
    log.append(3, DOWN, region(3))
    reason = reports.next()
    assert 'has failed' in reason
    assert 'a window that starts with iteration 2 or later is persisted' in reason
    assert log.first_iteration == 3
    assert value(log, 3, DOWN, 0) == 3


def test_error_of_the_callback_ends_neither_worker_nor_training(shm: Path) -> None:
    def fail(reason: str) -> None:
        raise RuntimeError(reason)

    log = UpstreamLog(shm / 'log', 2 * REGION, CPU, 0.0, fail)
    log.append(0, DOWN, torch.empty(4, device='meta'))
    log.append(1, DOWN, region(1).repeat(3))
    log.append(2, DOWN, region(2))
    assert value(log, 2, DOWN, 0) == 2
    log.close()


def test_close_wakes_readers_and_ends_the_thread(log: UpstreamLog) -> None:
    threads = threading.active_count()
    log.append(1, DOWN, region(1))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(log.read, LogKey(1, DOWN, 1), DEADLINE_S)
        log.close()
        with pytest.raises(LogGap, match='closed'):
            reading.result(DEADLINE_S)
    log.append(2, DOWN, region(2))
    log.close()
    log.drain()
    assert threading.active_count() == threads - 1


# ---- any sequence of operations

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([DOWN, UP]), st.integers(0, 40)),
        st.just('next'),
        st.tuples(st.sampled_from(['drop', 'rewind']), st.integers(0, 3)),
    ),
    max_size=50,
)


@given(steps=steps)
def test_all_records_since_the_first_iteration_are_readable(steps: list[object]) -> None:
    sent: dict[int, dict[Direction, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
    iteration, value = 10, 0
    with tmpfs_directory() as shm, opened(shm / 'log', Reports(), regions=16) as log:
        for step in steps:
            match step:
                case 'next':
                    iteration += 1
                case ('drop', int(back)):
                    log.drop_until(iteration - back - 1)
                case ('rewind', int(back)):
                    iteration -= back
                    log.rewind(iteration)
                    for later in [t for t in sent if t > iteration]:
                        del sent[later]
                case (Direction() as direction, int(elements)):
                    value += 1
                    tensor = torch.full((elements,), value, dtype=torch.int64)
                    log.append(iteration, direction, tensor)
                    sent[iteration][direction].append(tensor)
            _compare(log, sent)


def _compare(log: UpstreamLog, sent: dict[int, dict[Direction, list[torch.Tensor]]]) -> None:
    first = log.first_iteration
    for iteration, directions in sent.items():
        for direction, tensors in directions.items():
            for sequence, tensor in enumerate(tensors):
                key = LogKey(iteration, direction, sequence)
                if first is None or iteration < first:
                    with pytest.raises(LogGap):
                        log.read(key, 0)
                    continue
                found = log.read(key, DEADLINE_S)
                assert found is not None
                assert found[1] == tensor.numpy().tobytes()
                assert xxhash.xxh3_64_intdigest(found[1]) == found[0].checksum


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
