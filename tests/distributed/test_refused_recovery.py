# SPDX-License-Identifier: Apache-2.0
"""A recovery that computes other bits is refused, and the next recovery has the right bits."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moevement_ext.events import NextTier, Recovered, RecoveryStarted
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster

pytestmark = pytest.mark.thorough

BASE = (
    '--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 '
    '--expert-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 14'
).split()
STOP = ['--sparse-ckpt-verify', 'stop']
OLD = 4


def check(job: Cluster, expected: dict, attempt: int) -> None:
    """After the refused recovery there was one that found nothing wrong."""
    assert differences(expected, read_digest(job)) == []
    for rank in range(job.ranks):
        recovered = job.events_of(Recovered, rank)
        assert recovered and not any(event.differing for event in recovered)
        assert 'the start' not in [event.tier for event in job.events_of(NextTier, rank)]
    assert 'are kept in this process only' not in job.output(attempt)


def test_another_death_after_a_refused_recovery_is_survived(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """Host memory is as large as planned: what a recovery is judged by is in the plan."""
    job = cluster(*BASE, '--sparse-ckpt-window', '3', *STOP, exact_memory=True)
    mutation = 'mutations.localized:one_bit_wrong_in_the_first_replay_of_rank_3'
    job.survive(fail_at='3:8:backward,1:11:forward:1', mutation=mutation)
    assert 'differing: ' in job.output(0)
    check(job, reference(*BASE), attempt=0)
    assert job.events_of(Recovered)[-1].localized


def test_whole_job_restarts_from_disk_after_a_refusal(
    cluster: Callable[..., Cluster], reference: Callable[..., dict], tmp_path: Path
) -> None:
    """An old window is all that is left on disk: on the way from it whole ones are captured."""
    (tmp_path / 'disk').mkdir()
    disk = f'--sparse-ckpt-disk {tmp_path / "disk"} --sparse-ckpt-disk-every {OLD}'.split()
    job = cluster(*BASE, '--sparse-ckpt-window', '2', '--sparse-ckpt-replicas', '0', *STOP, *disk)
    assert -9 in job.run(fail_at='1:9:backward')
    assert len([*tmp_path.glob(f'disk/*/rank*/window-{OLD}-*')]) == job.ranks
    shutil.rmtree(job.node_memory(1), ignore_errors=True)
    wrong = 'mutations.localized:one_bit_wrong_on_rank_0'
    assert 0 not in job.run(mutation=wrong, all_end=True)
    assert 'differing: ' in job.output(attempt=1)
    shutil.rmtree(job.memory, ignore_errors=True)
    job.finish()
    check(job, reference(*BASE), attempt=2)
    for rank in range(job.ranks):
        came = job.events_of(RecoveryStarted, rank)[-1]
        assert (str(came.source), came.start) == ('disk', 0), f'{OLD} has been refused'
