# SPDX-License-Identifier: Apache-2.0
"""A job resumed from a dense checkpoint is protected like a job started from scratch."""

import shutil
import subprocess
from pathlib import Path

import pytest

from moevement_ext.events import DenseSaveFailed, Recovered
from tests.distributed.conftest import Make, Reference, differences, mounted_tmpfs, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.damage import flip_byte

PP2 = '--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 14'
SETUPS = {
    'bf16-plain': f'--bf16 {PP2}',
    'fp32-distributed': f'--use-distributed-optimizer {PP2}',
    # Experts of two ranks, whose generators upstream does not keep apart in a checkpoint.
    'experts': f'--bf16 --use-distributed-optimizer --expert-model-parallel-size 2 {PP2}',
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ('windows', 'setup'),
    [('damaged', 'experts'), ('damaged', 'fp32-distributed'), ('lost', 'bf16-plain')],
)
def test_windows_captured_after_a_dense_restart_restore_the_same_bits(
    windows: str, setup: str, cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    flags = SETUPS[setup].split()
    job = restarted(cluster, flags, windows, tmp_path)
    job.finish()
    (recovered,) = job.events_of(Recovered)
    assert recovered.replayed >= 2 and not recovered.differing
    assert differences(reference(*flags), read_digest(job)) == []


@pytest.mark.mutation
@pytest.mark.thorough
def test_windows_of_tensors_replaced_by_a_late_load_are_detected(
    cluster: Make, tmp_path: Path
) -> None:
    """The recovery itself says so; upstream's last dense checkpoint then refuses such a state."""
    flags = SETUPS['bf16-plain'].split()
    mutation = 'dense_load_without_renewal'
    job = restarted(cluster, flags, 'damaged', tmp_path, ranks=2, mutation=mutation)
    job.run()
    (recovered,) = job.events_of(Recovered)
    assert recovered.differing


def restarted(
    cluster: Make,
    flags: list[str],
    windows: str,
    tmp_path: Path,
    ranks: int = 4,
    mutation: str | None = None,
) -> Cluster:
    """A job that went on from a dense checkpoint and was cut off once more, windows later."""
    dense = ['--save', str(tmp_path / 'dense'), '--load', str(tmp_path / 'dense')]
    saves = [*dense, '--save-interval', '4']
    job = cluster(*flags, *saves, '--sparse-ckpt-window', '3', ranks=ranks)
    assert -9 in job.run(fail_at='1:6:forward')
    if windows == 'lost':
        shutil.rmtree(job.memory)
    else:
        damaged = list(job.memory.rglob('1/window-*.window'))
        assert damaged
        for path in damaged:
            flip_byte(path)
    assert -9 in job.run(fail_at='1:12:forward', mutation=mutation)
    assert 'loaded checkpoint' in job.output(attempt=1)
    return job


def test_full_disk_costs_dense_checkpoints_and_not_the_run(
    cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    """The last one may not fail: windows are freed after it, and they are all that is left."""
    flags = '--bf16 --train-iters 8'.split()
    with mounted_tmpfs(tmp_path / 'full', '64k') as full:
        saves = ['--save', str(full), '--save-interval', '2', '--sparse-ckpt-window', '2']
        job = cluster(*flags, *saves, ranks=2)
        assert 1 in job.run()
        failed = job.events_of(DenseSaveFailed)
        assert [event.iteration for event in failed] == [2, 4, 6] and failed[0].reason
        assert not job.events_of(DenseSaveFailed, rank=1)
        subprocess.run(['mount', '-o', 'remount,size=200m', str(full)], check=True)
        job.finish()
        assert (full / 'latest_checkpointed_iteration.txt').read_text() == '8'
    assert differences(reference(*flags, ranks=2), read_digest(job)) == []


@pytest.mark.thorough
def test_training_phase_resumes_with_its_own_samples(cluster: Make, tmp_path: Path) -> None:
    """Upstream counts those of a phase from its beginning, where it has ended a launch."""
    flags = (
        '--bf16 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights '
        '--train-samples 48 --phase-transition-iterations 6'
    ).split()
    dense = str(tmp_path / 'dense')
    by_samples(cluster(*flags, *save(dense), sparse=False, ranks=2)).finish()
    plain = by_samples(cluster(*flags, '--load', dense, sparse=False, ranks=2))
    plain.finish()
    job = cluster(*flags, '--load', dense, *save(dense), '--sparse-ckpt-window', '2', ranks=2)
    assert -9 in by_samples(job).run(fail_at='0:10:forward')
    job.finish()
    (recovered,) = job.events_of(Recovered)
    assert recovered.iteration == 9
    assert differences(read_digest(plain), read_digest(job)) == []


RANDOM_ROUTING = (
    '--bf16 --use-distributed-optimizer --expert-model-parallel-size 2 --train-iters 8 '
    '--moe-router-force-load-balancing'
).split()


def routed_at_random(cluster: Make, checkpoints: Path) -> Cluster:
    """Dead, with a dense checkpoint and no windows."""
    dense = ['--save', str(checkpoints), '--load', str(checkpoints), '--save-interval', '4']
    job = cluster(*RANDOM_ROUTING, *dense, ranks=2)
    assert -9 in job.run(fail_at='1:6:forward')
    shutil.rmtree(job.memory)
    return job


def test_random_routing_resumes_from_a_dense_checkpoint(
    cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    """Each rank draws from a generator of its own, and upstream keeps that of the first alone."""
    flags, checkpoints, saved = RANDOM_ROUTING, tmp_path / 'dense', tmp_path / 'copy'
    job = routed_at_random(cluster, checkpoints)
    kept = sorted(checkpoints.glob('iter_*/moevement/random-*'))
    assert [path.name for path in kept] == ['random-00000', 'random-00001']
    shutil.copytree(checkpoints, saved)
    job.finish()
    assert 'loaded checkpoint' in job.output(attempt=1)
    assert differences(reference(*flags, ranks=2), read_digest(job)) == []

    for path in saved.glob('iter_*/moevement/random-00001'):
        path.unlink()
    without = cluster(*flags, '--load', str(saved), ranks=2)
    without.finish()
    assert 'no random numbers of rank 1' in without.output(attempt=0)
    found = differences(reference(*flags, ranks=2), read_digest(without))
    assert any(name.endswith('expert-parallel-rng') for name in found)


@pytest.mark.thorough
def test_omitting_generators_of_a_dense_checkpoint_changes_the_bits(
    cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    job = routed_at_random(cluster, tmp_path / 'dense')
    mutation = 'mutations.whole_job:random_numbers_of_a_dense_checkpoint_not_restored'
    job.finish(mutation=mutation)
    assert 'loaded checkpoint' in job.output(attempt=1)
    assert differences(reference(*RANDOM_ROUTING, ranks=2), read_digest(job)) != []


def save(directory: str) -> list[str]:
    """Flags for a dense checkpoint at the end of a launch."""
    return ['--save', directory, '--save-interval', '100']


def by_samples(job: Cluster) -> Cluster:
    """The same job with a schedule of the learning rate that counts samples."""
    for name in ('warmup', 'decay'):
        at = job.flags.index(f'--lr-{name}-iters')
        job.flags[at : at + 2] = [f'--lr-{name}-samples', str(4 * int(job.flags[at + 1]))]
    return job
