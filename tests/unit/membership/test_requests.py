# SPDX-License-Identifier: Apache-2.0
"""Requests of ranks to the launcher's store do not grow with their waiting time."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest
from torch.distributed import TCPStore

from moevement_ext.membership.exchange import hand_out, handed_out
from moevement_ext.membership.rendezvous import Rendezvous
from tests.unit.membership.counted_store import CountedStore, Tally
from tests.unit.membership.large_job import LargeJob

pytestmark = pytest.mark.timed

WORLD = 4
TIMEOUT = timedelta(seconds=60)


class Job:
    """Ranks whose requests are counted."""

    def __init__(self) -> None:
        self.store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.tally = Tally()
        self.ranks = [Rendezvous(self.connect(), rank, WORLD) for rank in range(WORLD)]

    def connect(self) -> CountedStore:
        store = TCPStore('127.0.0.1', self.store.port, is_master=False, timeout=TIMEOUT)
        return CountedStore(store, self.tally)


@pytest.fixture
def job() -> Iterator[Job]:
    yield Job()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORLD) as threads:
        yield threads


def come_to_rest(job: Job) -> None:
    """Return when no request was sent for a second: all ranks wait at the barrier."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    before = -1
    while job.tally.read().requests != before:
        assert time.monotonic() < deadline, 'they ask again and again'
        before = job.tally.read().requests
        time.sleep(1.0)


def test_waiting_ranks_send_no_requests(job: Job, threads: ThreadPoolExecutor) -> None:
    early = [threads.submit(rank.meet, lambda: b'', TIMEOUT) for rank in job.ranks[1:]]
    while job.store.add('here/0/0', 0).bit_count() < WORLD - 1:
        time.sleep(0.01)
    come_to_rest(job)
    results = [job.ranks[0].meet(lambda: b'', TIMEOUT), *(future.result() for future in early)]
    waiting = [
        threads.submit(rank.barrier, result, 'ready', TIMEOUT)
        for rank, result in zip(job.ranks[1:], results[1:], strict=True)
    ]
    while job.store.add('round/0/barrier/ready', 0) < WORLD - 1:
        time.sleep(0.01)
    come_to_rest(job)
    job.ranks[0].barrier(results[0], 'ready', TIMEOUT)
    assert [future.result() for future in waiting] == [None] * 3


def test_reports_of_a_large_job_are_sent_as_differences() -> None:
    layout, world = LargeJob(512), 512
    reports = [msgspec.msgpack.encode(layout.report(rank, 0, 41)) for rank in range(world)]
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    tally = Tally()
    counted = CountedStore(store, tally)
    hand_out(counted, reports)
    assert tally.read().nbytes < sum(map(len, reports)) / 20
    assert handed_out(counted) == reports
