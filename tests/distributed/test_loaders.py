# SPDX-License-Identifier: Apache-2.0
"""Worker processes of data loaders: recoveries start new workers, and the old workers end."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import ON_BOTH_BACKENDS, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.probes import holding
from tests.unit.readable import dies

pytestmark = [ON_BOTH_BACKENDS, pytest.mark.timeout(500)]

FLAGS = (
    '--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 '
    '--expert-model-parallel-size 2 --untie-embeddings-and-output-weights'
).split()
WINDOW = ['--sparse-ckpt-window', '3']
WORKERS = 2


def with_workers(cluster: Callable[..., Cluster], *flags: str) -> Cluster:
    return cluster(*FLAGS, *WINDOW, *flags, '--num-workers', str(WORKERS))


class Looking:
    """Kills ranks one after the other, once all have committed an iteration, and looks around.

    No rank begins the next iteration before that.
    """

    def __init__(self, job: Cluster, faults: list[tuple[int, int]]) -> None:
        self.job = job
        self.faults = faults
        job.directory.mkdir()
        for _, iteration in faults:
            holding.file(job.directory, iteration + 1).touch()
        self.struck = 0
        self.orphans: list[int] = []
        self.loaders: list[list[psutil.Process]] = []
        self.sockets: list[Any] = []

    def __call__(self, workers: list, start: Callable[[int], Any]) -> None:
        if not self.faults or not self.job._reached(self.faults[0][1]):
            return
        if any(len(self.job.events_of(Recovered, rank)) < self.struck for rank in range(4)):
            return  # the last fault's victim is not back yet
        rank, iteration = self.faults.pop(0)
        self.struck += 1
        for worker in workers:
            self._look(worker.pid, worker is workers[rank])
        holding.file(self.job.directory, iteration + 1).unlink()
        os.kill(workers[rank].pid, signal.SIGKILL)

    def _look(self, pid: int, dying: bool) -> None:
        children = psutil.Process(pid).children(recursive=True)
        self.loaders.append(children)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # an evaluation's ends by itself
                found = child.net_connections('inet')
                self.sockets += [one for one in found if one.type == socket.SOCK_STREAM]
        if dying:
            self.orphans += [child.pid for child in children]


@pytest.mark.thorough
def test_recoveries_with_loader_workers_have_the_same_bits(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """Five recoveries, of ranks that read data; the deaths are not announced."""
    iterations = ['--train-iters', '30']
    job = with_workers(cluster, *iterations)
    faults = [(0, 5), (3, 9), (1, 13), (2, 17), (0, 21)]
    looking = Looking(job, faults)
    restarts = job.survive(
        fault=looking, announce=False, mutation='probes.holding:wait_to_be_let_on'
    )
    assert restarts == {0: 2, 1: 1, 2: 1, 3: 1}
    assert differences(reference(*FLAGS, *iterations), read_digest(job)) == []
    assert looking.sockets == []  # or a dead rank's peers would not notice
    assert all(dies(pid) for pid in looking.orphans)
    (count,) = {len(children) for children in looking.loaders}  # always as many as at first
    assert count >= WORKERS
    assert not any(
        child.is_running() and child.status() == psutil.STATUS_ZOMBIE
        for children in looking.loaders
        for child in children
    )


@pytest.mark.thorough
def test_whole_job_recovers_with_loader_workers(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    iterations = ['--train-iters', '12']
    job = with_workers(cluster, *iterations)
    assert job.run(fail_at='1:8:forward') != [0] * 4
    job.finish()
    assert job.events_of(Recovered)[0].replayed > 0
    assert differences(reference(*FLAGS, *iterations), read_digest(job)) == []
