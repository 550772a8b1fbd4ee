# SPDX-License-Identifier: Apache-2.0
"""A rank that is slow is named, and so is its end; no rank is lost for it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moevement_ext.events import SlowRank, WindowCommitted
from tests.distributed.conftest import Make
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.setups import BF16, PP2, UNTIED
from tools.lab.history import History, read_history
from tools.status import slowest

# The test ends the job, once all that it waits for has happened.
FLAGS = f'{BF16} {UNTIED} --sparse-ckpt-window 3 --train-iters 5000 --exit-signal-handler'.split()
_PULSE_S = 0.03


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


def test_rank_that_is_stopped_again_and_again_is_named(cluster: Make) -> None:
    check_named(cluster(*FLAGS, '--num-layers', '1', ranks=2))


@pytest.mark.thorough
def test_slow_rank_of_a_pipeline_is_named(cluster: Make) -> None:
    job = cluster(*FLAGS, *PP2.split())
    check_named(job)
    waits = job.events_of(WindowCommitted, rank=2)[-1].waits_s
    assert waits['0'] > 0, 'its stage waits for the stage before'


def check_named(job: Cluster) -> None:
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
        with pulses(workers[last].pid):
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
