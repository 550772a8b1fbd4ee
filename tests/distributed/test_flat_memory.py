# SPDX-License-Identifier: Apache-2.0
"""A long run does not grow: memory, threads, open files and host memory stay where they were."""

import statistics
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from moevement_ext.events import WindowPersisted
from tests.distributed.conftest import Make
from tests.distributed.harness.cluster import Cluster

pytestmark = pytest.mark.thorough

ITERATIONS = 300
FLAGS = (
    '--bf16 --use-distributed-optimizer --expert-model-parallel-size 2 --num-layers 1 '
    f'--global-batch-size 2 --train-iters {ITERATIONS} --log-interval 10'
).split()
WINDOW = ['--sparse-ckpt-window', '3']
SAMPLE_S = 0.05
RSS_GROWTH_BYTES = 8 << 20
"""More than plain Megatron, whose heap grows too; half of the slots captured between the looks."""


class Sample(NamedTuple):
    """What one worker, and the host memory of the run, hold at one moment."""

    rss: int
    threads: int
    descriptors: int
    mappings: int
    files: int
    file_bytes: int


def test_resources_stay_flat_in_a_long_run(cluster: Make) -> None:
    plain = cluster(*FLAGS, sparse=False, ranks=2)
    allowed = RSS_GROWTH_BYTES + max(after.rss - before.rss for before, after in trends(plain))
    job = cluster(*FLAGS, *WINDOW, ranks=2, nodes=2)
    for before, after in trends(job):
        assert after.rss - before.rss < allowed, (before, after)
        assert after.threads <= before.threads, (before, after)
        assert after.descriptors <= before.descriptors, (before, after)
        assert after.mappings <= before.mappings + 8, (before, after)
        assert 0 < after.files <= before.files, (before, after)
        assert after.file_bytes <= before.file_bytes, (before, after)
    persisted = len(job.events_of(WindowPersisted))
    assert persisted > ITERATIONS // 3 - 10, 'windows were replicated all along'


def trends(job: Cluster) -> list[tuple[Sample, Sample]]:
    """Medians of each worker over the second and the last quarter; the first is warm-up."""
    with ThreadPoolExecutor(1) as pool:
        samples = sampled(job, pool.submit(job.finish))
    assert len(samples) == job.ranks
    return [
        (median(of[len(of) // 4 : len(of) // 2]), median(of[-len(of) // 4 :])) for of in samples
    ]


def sampled(job: Cluster, running: Future[None]) -> list[list[Sample]]:
    """Samples of every worker while it trains; set-up and exit are left out."""
    samples: dict[int, list[Sample]] = defaultdict(list)
    while not wait([running], SAMPLE_S).done:
        if logged(job, 10) and not logged(job, ITERATIONS):
            for worker in workers():
                with suppress(psutil.NoSuchProcess, OSError):  # it may end between two looks
                    samples[worker.pid].append(sample(worker, job.memory))
    running.result()
    counts = [len(of_worker) for of_worker in samples.values()]
    assert min(counts) > 20, counts
    return list(samples.values())


def workers() -> list[psutil.Process]:
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return psutil.Process(server).children()


def logged(job: Cluster, iteration: int) -> bool:
    log = job.log(job.ranks - 1)
    return log.exists() and f'iteration {iteration:8d}/' in log.read_text()


def sample(worker: psutil.Process, memory: Path) -> Sample:
    with worker.oneshot():
        sizes = [path.stat().st_size for path in memory.rglob('*') if path.is_file()]
        return Sample(
            worker.memory_info().rss,
            worker.num_threads(),
            worker.num_fds(),
            Path(f'/proc/{worker.pid}/maps').read_bytes().count(b'\n'),
            len(sizes),
            sum(sizes),
        )


def median(samples: list[Sample]) -> Sample:
    return Sample(*(int(statistics.median(values)) for values in zip(*samples, strict=True)))
