# SPDX-License-Identifier: Apache-2.0
"""Ranks do not wait for stuck ranks, and slow ranks are not mistaken for stuck ones."""

import os
import re
import signal
from collections.abc import Callable

import pytest

from moevement_ext.events import (
    DeviceProblem,
    NextTier,
    Recovered,
    WindowPersisted,
    WorkerStarted,
)
from tests.distributed.conftest import ON_BOTH_BACKENDS, Make, Reference, differences, read_digest
from tests.distributed.harness.local_cluster import launch
from tests.distributed.test_whole_job_recovery import BASE

pytestmark = pytest.mark.thorough


UNTIED = '--bf16 --use-distributed-optimizer --untie-embeddings-and-output-weights'
PP4 = f'{UNTIED} --pipeline-model-parallel-size 4 --train-iters 12'
PP2 = f'{UNTIED} --pipeline-model-parallel-size 2 --train-iters 40'


@pytest.mark.parametrize(
    ('fault', 'mutation', 'said'),
    [
        (['--stop', '2@7'], None, 'rank 2 (pid {pid}) has sent no heartbeat for 10 s: killed'),
        ([], 'liveness.loader_of_rank_2_blocks', 'rank 2 (pid {pid}) ended with exit status 76'),
    ],
    ids=['stopped', 'stuck'],
)
def test_hang_is_detected_in_whole_job_mode(
    fault: list[str], mutation: str | None, said: str, cluster: Make, reference: Reference
) -> None:
    """The others would wait until their collectives time out, and fail by themselves then."""
    flags = BASE
    job = cluster(
        *flags,
        *'--sparse-ckpt-window 3 --sparse-ckpt-recovery whole-job'.split(),
        *'--sparse-ckpt-hang-timeout 10 --sparse-ckpt-stuck-timeout 10'.split(),
    )
    code, output = launch(job, *fault, mutation=mutation)
    assert code == 0, output[-5000:]
    assert differences(reference(*flags), read_digest(job)) == []
    (pid,) = re.findall(r'rank 2: started, pid (\d+), restart 0', output)
    assert said.format(pid=pid) in output
    assert len(job.events_of(Recovered)) == 1


def test_worker_that_waits_for_a_page_is_not_hung(cluster: Make, reference: Reference) -> None:
    flags = BASE
    job = cluster(*flags, *'--sparse-ckpt-window 3 --sparse-ckpt-hang-timeout 6'.split())
    code, output = launch(job, mutation='liveness.loader_of_rank_2_waits_for_a_page')
    assert code == 0, output[-5000:]
    assert differences(reference(*flags), read_digest(job)) == []
    assert 'restart 1' not in output
    assert job.events_of(Recovered) == []


@pytest.mark.parametrize('recovery', ['localized', 'whole-job'])
def test_worker_with_a_lost_device_exits_and_is_replaced(
    recovery: str, cluster: Make, reference: Reference
) -> None:
    """Long before anybody counts it as hung or stuck."""
    flags = BASE
    job = cluster(*flags, '--sparse-ckpt-window', '3', '--sparse-ckpt-recovery', recovery)
    code, output = launch(job, mutation='liveness.device_of_rank_2_is_lost')
    assert code == 0, output[-5000:]
    assert differences(reference(*flags), read_digest(job)) == []
    assert 'ended with exit status 76' in output
    assert 'rank 2 replaces itself: its GPU is lost: the driver does not reach it' in output
    (problem,) = job.events_of(DeviceProblem, rank=2)
    assert (problem.device, problem.harm) == ('GPU-2', 'device')
    recovered = [job.events_of(Recovered, rank) for rank in range(job.ranks)]
    assert all(len(found) == 1 for found in recovered)
    assert {found[0].localized for found in recovered} == {recovery == 'localized'}


@ON_BOTH_BACKENDS
def test_sole_survivor_stopped_before_the_rendezvous_is_replaced(
    cluster: Make, reference: Reference
) -> None:
    """Only the new worker can notice."""
    flags = PP2.split()
    job = cluster(*flags, '--sparse-ckpt-window', '3', '--sparse-ckpt-hang-timeout', '4', ranks=2)
    stopped: list[int] = []

    def fault(workers: list, start: Callable) -> None:
        if not stopped and job.events_of(WindowPersisted, rank=1):
            stopped.append(workers[1].pid)
            os.kill(workers[0].pid, signal.SIGSTOP)
            os.kill(workers[1].pid, signal.SIGKILL)

    assert set(job.survive(fault=fault)) == {0, 1}
    assert differences(reference(*flags, ranks=2), read_digest(job)) == []
    for rank in range(2):
        recovered = job.events_of(Recovered, rank)
        assert recovered and recovered[-1].replayed > 0, 'windows were still there'


@ON_BOTH_BACKENDS
def test_new_worker_in_set_up_survives_another_death(cluster: Make, reference: Reference) -> None:
    """For longer than the time after which a worker counts as hung."""
    flags = PP4.split()
    job = cluster(*flags, '--sparse-ckpt-window', '3', '--sparse-ckpt-hang-timeout', '4', nodes=4)
    struck: list[int] = []

    def fault(workers: list, start: Callable) -> None:
        if not struck and len(job.events_of(WorkerStarted, rank=1)) == 2:
            struck.append(workers[2].pid)
            os.kill(workers[2].pid, signal.SIGKILL)

    mutation = 'mutations.localized:slow_set_up_of_new_worker'
    assert job.survive(fail_at='1:9:forward', fault=fault, mutation=mutation) == {1: 1, 2: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    assert [event for rank in range(job.ranks) for event in job.events_of(NextTier, rank)] == []
    assert 'joining again' in job.output(0)
