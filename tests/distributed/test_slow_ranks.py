# SPDX-License-Identifier: Apache-2.0
"""A rank that is slow is named, and so is its end; no rank is lost for it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from moevement_ext.events import SlowRank, WindowCommitted
from tests.distributed.conftest import Make
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.setups import BF16, PP2, UNTIED
from tools.lab.history import History, read_history
from tools.status import slowest

type Slowed = Callable[[int], AbstractContextManager[None]]
# The test ends the job, once all that it waits for has happened.
FLAGS = f'{BF16} {UNTIED} --sparse-ckpt-window 3 --train-iters 5000 --exit-signal-handler'.split()
_PULSE_S = 0.03
_QUOTAS = 'cpu.max', 'cpu.cfs_quota_us'


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
def limited(pid: int) -> Iterator[None]:
    """Give the process a tenth of a core, as a limit of a container does."""
    root = Path('/sys/fs/cgroup/cpu')  # of version 1, else of version 2
    root = root if root.exists() else root.parent
    group = root / f'moevement-tests-{pid}'
    try:
        group.mkdir()
        (quota,) = (group / name for name in _QUOTAS if (group / name).exists())
        quota.write_text('10000')  # microseconds in a tenth of a second
        (group / 'cgroup.procs').write_text(str(pid))
    except (OSError, ValueError) as error:
        pytest.skip(f'no limit can be set here: {error}')
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            (root / 'cgroup.procs').write_text(str(pid))
        group.rmdir()


@pytest.mark.parametrize(
    'slowed', [pulses, pytest.param(limited, marks=pytest.mark.thorough)], ids=['stops', 'limit']
)
def test_slow_rank_is_named(slowed: Slowed, cluster: Make) -> None:
    check_named(cluster(*FLAGS, '--num-layers', '1', ranks=2), slowed)


@pytest.mark.thorough
def test_slow_rank_of_a_pipeline_is_named(cluster: Make) -> None:
    job = cluster(*FLAGS, *PP2.split())
    check_named(job, pulses)
    waits = job.events_of(WindowCommitted, rank=2)[-1].waits_s
    assert waits['0'] > 0, 'its stage waits for the stage before'


def check_named(job: Cluster, slowed: Slowed) -> None:
    """The last rank is."""
    last, told = job.ranks - 1, list[SlowRank]()

    def wait(workers: list, met: Callable[[SlowRank], bool]) -> None:
        while workers[0].is_alive():
            events = (one for one in job.events_of(SlowRank) if one.slow == last)
            if found := next(filter(met, events), None):
                return told.append(found)
            time.sleep(0.2)

    def slow(workers: list, start: object) -> None:
        if told or not job.events_of(WindowCommitted):
            return
        with slowed(workers[last].pid):
            wait(workers, lambda one: one.iterations > 0)
        wait(workers, lambda one: one.iterations == 0)
        for worker in workers:
            worker.terminate()

    assert job.survive(fault=slow) == {}
    named, over = told
    assert named.ratio > 1.2 and named.iterations >= 40 and over.ratio < 1.1, job.account()
    history = read_history(job.directory / 'events')
    then = History([event for event in history.events if event.time <= named.time])
    assert slowest(then).startswith(f'rank {last} on node1, {named.ratio:.2f} times the median')
    waits = job.events_of(WindowCommitted, rank=last - 1)[-1].waits_s
    assert waits['group'] > 0, 'and for the slow rank'
