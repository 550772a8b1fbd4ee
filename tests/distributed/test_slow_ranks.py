# SPDX-License-Identifier: Apache-2.0
"""A rank that is slow is named, and so is its end; no rank is lost for it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moevement_ext.events import SlowRank, WindowCommitted
from tests.distributed.conftest import Make
from tools.lab.history import History, read_history
from tools.status import slowest

SLOW = 3
FLAGS = (
    '--bf16 --use-distributed-optimizer --untie-embeddings-and-output-weights '
    '--pipeline-model-parallel-size 2 --train-iters 200 --sparse-ckpt-window 3'
).split()
_PULSE_S = 0.03
_LIMITS = Path('/sys/fs/cgroup/cpu'), Path('/sys/fs/cgroup')
_MS_OF_100 = 25


@contextmanager
def pulses(pid: int) -> Iterator[None]:
    """Stop the process for more than half of the time."""
    over = threading.Event()

    def strike() -> None:
        while not over.wait(_PULSE_S / 2):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_PULSE_S)
            os.kill(pid, signal.SIGCONT)

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        yield
    finally:
        over.set()
        striking.join()


@contextmanager
def limit(pid: int) -> Iterator[None]:
    """Give the process a quarter of a core, by a control group of either version."""
    root = next(root for root in _LIMITS if (root / 'cgroup.procs').exists())
    group = root / f'moevement-test-{pid}'
    group.mkdir()
    try:
        if (group / 'cpu.cfs_quota_us').exists():
            (group / 'cpu.cfs_quota_us').write_text(f'{_MS_OF_100}000')
        else:
            (group / 'cpu.max').write_text(f'{_MS_OF_100}000 100000')
        (group / 'cgroup.procs').write_text(str(pid))
        yield
    finally:
        for left in (group / 'cgroup.procs').read_text().split():
            (root / 'cgroup.procs').write_text(left)
        group.rmdir()


@pytest.fixture
def may_limit() -> None:
    try:
        with limit(os.getpid()):
            pass
    except (OSError, StopIteration) as error:
        pytest.skip(f'this machine lets no test limit the CPU time of a process: {error}')


def test_rank_that_is_stopped_again_and_again_is_named(cluster: Make) -> None:
    check_named(cluster, pulses)


@pytest.mark.thorough
@pytest.mark.usefixtures('may_limit')
def test_rank_with_a_part_of_a_core_is_named(cluster: Make) -> None:
    check_named(cluster, limit)


def check_named(cluster: Make, slows: Callable[[int], 'Iterator[None]']) -> None:
    job = cluster(*FLAGS)
    told: list[SlowRank] = []

    def slow(workers: list, start: object) -> None:
        if told or not job.events_of(WindowCommitted):
            return
        with slows(workers[SLOW].pid):
            deadline = time.monotonic() + 120
            while not told and time.monotonic() < deadline and workers[0].is_alive():
                time.sleep(0.2)
                told.extend(one for one in job.events_of(SlowRank) if one.slow == SLOW)

    assert job.survive(fault=slow) == {}
    assert told and told[0].ratio > 1.2 and told[0].iterations >= 40, job.account()
    history = read_history(job.directory / 'events')
    then = History([event for event in history.events if event.time <= told[0].time])
    assert slowest(then).startswith(f'rank {SLOW} on node1, {told[0].ratio:.2f} times the median')
    last = [one for one in job.events_of(SlowRank) if one.slow == SLOW][-1]
    assert last.iterations == 0 and last.ratio < 1.1, job.account()
    waits = job.events_of(WindowCommitted, rank=2)[-1].waits_s
    assert waits['0'] > 0, 'its stage waits for the stage before'
    assert waits['group'] > 0, 'and for the slow rank'
