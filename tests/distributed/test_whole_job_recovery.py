# SPDX-License-Identifier: Apache-2.0
"""The whole job is SIGKILLed and started again; at the end every bit equals the fault-free run."""

import re
import shutil
from collections.abc import Callable

import pytest

from moevement_ext.events import Recovered, WindowPersisted
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.quick import with_quick

BF16 = '--bf16 --use-distributed-optimizer'
PP_EP = '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'
UNTIED = '--untie-embeddings-and-output-weights'
ITERATIONS = '--train-iters 12'
BASE = f'{BF16} {PP_EP} {UNTIED} {ITERATIONS}'.split()

FP16_HYSTERESIS = (
    '--fp16 --initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 2 --min-loss-scale 2048 '
    f'--use-distributed-optimizer {PP_EP} {UNTIED} --calculate-per-token-loss --global-batch-size 8'
)

# Each line: precision and optimizer, layout, features; window; where it dies.
SETUPS = {
    'bf16-distributed-pp2-ep2': (f'{BF16} {PP_EP} {UNTIED}', 3, '1:8:forward'),
    'window-1': (f'{BF16} {PP_EP} {UNTIED}', 1, '2:8:replicate'),
    'window-5': (f'{BF16} {PP_EP} {UNTIED}', 5, '3:11:optimizer'),
    'bf16-plain-dp2-pp2': (f'--bf16 --pipeline-model-parallel-size 2 {UNTIED}', 3, '0:9:step'),
    'fp32-dp2-pp2-tied': ('--pipeline-model-parallel-size 2', 3, '1:8:forward'),
    'distributed-dp2-pp2-tied': (f'{BF16} --pipeline-model-parallel-size 2', 3, '2:9:after-step'),
    'dropout-recompute': (
        f'{BF16} {PP_EP} {UNTIED} --hidden-dropout 0.1 --attention-dropout 0.1 '
        '--recompute-granularity full --recompute-method uniform --recompute-num-layers 1',
        3,
        '3:8:backward',
    ),
    'cyclic-data-dropout': (
        f'{BF16} {PP_EP} {UNTIED} --dataloader-type cyclic --hidden-dropout 0.1 '
        '--eval-interval 4 --eval-iters 2',
        3,
        '1:8:forward',
    ),
    'router-bias': (
        f'{BF16} {PP_EP} {UNTIED} --moe-router-enable-expert-bias '
        '--moe-router-score-function sigmoid --moe-router-bias-update-rate 1e-2',
        3,
        '1:9:capture',
    ),
    'tp2-sequence-parallel': (
        f'{BF16} --tensor-model-parallel-size 2 --sequence-parallel '
        f'--pipeline-model-parallel-size 2 {UNTIED}',
        3,
        '2:8:forward',
    ),
    'virtual-pipeline-2': (
        f'{BF16} {PP_EP} {UNTIED} --num-layers-per-virtual-pipeline-stage 1',
        3,
        '0:8:optimizer',
    ),
    'overlapped-communication-ep2-edp2': (
        f'{BF16} --expert-model-parallel-size 2 {UNTIED} --overlap-grad-reduce '
        '--overlap-param-gather',
        3,
        '1:8:step',
    ),
    # The scale grows every second step, so iterations 5 and 7, both replayed, overflow and skip:
    # with these batches.
    'fp16-dynamic-scale-per-token-loss': (
        '--fp16 --initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 1 '
        f'--use-distributed-optimizer {PP_EP} {UNTIED} --calculate-per-token-loss '
        '--global-batch-size 8',
        4,
        '1:9:forward',
    ),
    # Two skips in a row before the scale goes down, here to its lower bound. Iteration 5 is the
    # last one that is replayed, 6 the first one after that, and both are skipped.
    'fp16-hysteresis-skips-on-both-sides': (FP16_HYSTERESIS, 2, '1:6:forward'),
    'fp16-plain-dp2-pp2-skips': (
        '--fp16 --initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 1 '
        f'--pipeline-model-parallel-size 2 {UNTIED} --calculate-per-token-loss',
        3,
        '1:9:forward',
    ),
    'fp16-fixed-scale': (
        f'--fp16 --loss-scale 1024 --use-distributed-optimizer {PP_EP} {UNTIED}',
        3,
        '1:8:forward',
    ),
    'bf16-fixed-scale': (f'{BF16} --loss-scale 1024 {PP_EP} {UNTIED}', 3, '1:8:forward'),
    'dense-layers-shared-experts-etp': (
        f'{BF16} {PP_EP} {UNTIED} --moe-layer-freq [0,1,1,1] '
        '--moe-shared-expert-intermediate-size 32',
        3,
        '0:8:seal',
    ),
}


def _flags(setup: str) -> list[str]:
    return f'{setup} {ITERATIONS}'.split()


@pytest.mark.parametrize('name', with_quick(SETUPS))
def test_recovered_run_has_the_bits_of_a_fault_free_run(
    name: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    setup, window, fail_at = SETUPS[name]
    flags = _flags(setup)
    job = cluster(*flags, '--sparse-ckpt-window', str(window))
    codes = job.run(fail_at=fail_at)
    assert -9 in codes
    job.finish()
    assert differences(reference(*flags), read_digest(job)) == []
    (recovered,) = job.events_of(Recovered)
    assert recovered.replayed >= window - 1
    assert not job.memory.exists(), 'host memory is given back at a clean exit'


@pytest.mark.thorough
def test_one_iteration_windows_continue_after_a_recovery(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """The new plan's first window would begin with the one that the job came back from."""
    job = cluster(*BASE, '--sparse-ckpt-window', '1')
    job.run(fail_at='1:5:forward')
    job.run(fail_at='2:10:forward')
    job.finish()
    assert differences(reference(*BASE), read_digest(job)) == []
    first, second = job.events_of(Recovered)
    assert second.iteration - second.replayed > first.iteration


@pytest.mark.thorough
def test_swapped_nodes_drop_windows_of_their_former_ranks(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    """As in a job that goes back to the queue, and gets its nodes in another order."""
    job = cluster(*BASE, '--sparse-ckpt-window', '2')
    job.run(fail_at='1:6:forward')
    first, second = job.node_memory(0), job.node_memory(1)
    first.rename(job.memory / 'other')
    second.rename(first)
    (job.memory / 'other').rename(second)
    job.run(fail_at='1:11:forward')
    assert sorted(path.name for path in first.iterdir() if path.name.isdecimal()) == ['0', '1']
    job.finish()
    assert differences(reference(*BASE), read_digest(job)) == []
    assert len(job.events_of(Recovered)) == 2
    assert not job.memory.exists()


@pytest.mark.thorough
def test_training_with_sparse_checkpointing_has_the_bits_of_plain_megatron(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3')
    job.finish()
    assert differences(reference(*BASE), read_digest(job)) == []
    assert len(job.events_of(WindowPersisted)) >= 3


@pytest.mark.thorough
def test_lost_node_is_recovered_from_replicas(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3')
    job.run(fail_at='0:9:forward')
    assert list(job.node_memory(1).rglob('window-*.window'))
    shutil.rmtree(job.node_memory(1))
    job.finish()
    assert differences(reference(*BASE), read_digest(job)) == []
    assert len(job.events_of(Recovered, rank=3)) == 1


@pytest.mark.thorough
def test_deaths_during_and_right_after_a_recovery_are_survived(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '5')
    job.run(fail_at='1:11:backward')
    assert -9 in job.run(fail_at='2:8:load')
    assert -9 in job.run(fail_at='3:9:convert')
    assert -9 in job.run(fail_at='0:11:forward')
    job.finish()
    assert differences(reference(*BASE), read_digest(job)) == []


@pytest.mark.thorough
def test_death_before_the_first_window_starts_over(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '5')
    assert -9 in job.run(fail_at='1:3:forward')
    job.finish()
    assert differences(reference(*BASE), read_digest(job)) == []
    assert job.events_of(Recovered) == []


@pytest.mark.thorough
@pytest.mark.parametrize('delay_s', [0.05, 0.21])
def test_job_killed_at_an_arbitrary_moment_recovers(
    delay_s: float, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3')
    job.run(kill_after_iteration=7, kill_delay_s=delay_s)
    job.finish()
    assert differences(reference(*BASE), read_digest(job)) == []


def skipped_in(job: Cluster, attempt: int = 0) -> set[int]:
    """Iterations of one attempt of which some rank says that their step was skipped."""
    return skipped_by(job.output(attempt))


def skipped_by(output: str) -> set[int]:
    """Iterations whose step was skipped, by upstream's lines."""
    lines = re.finditer(r'iteration +(\d+)/.*skipped iterations: +[1-9]', output)
    return {int(found[1]) for found in lines}


@pytest.mark.thorough
def test_skipped_steps_are_replayed_as_skips(cluster: Callable[..., Cluster]) -> None:
    setup, window, fail_at = SETUPS['fp16-dynamic-scale-per-token-loss']
    job = cluster(*_flags(setup), '--sparse-ckpt-window', str(window))
    job.run(fail_at=fail_at)
    skipped = skipped_in(job)
    assert {5, 7} <= skipped and not {6, 8} & skipped


@pytest.mark.thorough
def test_skipped_steps_on_both_sides_of_a_failure_are_restored(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(*_flags(FP16_HYSTERESIS), sparse=False)
    job.finish()
    assert {5, 6} <= skipped_in(job)
    scales = re.findall(r'loss scale: ([0-9.]+)', job.output(attempt=0))
    assert min(map(float, scales)) == 2048.0, 'its lower bound'


LOSS = 'loss from iteration 7'
MUTATIONS = {
    'overflow_not_replayed': _flags(SETUPS['fp16-dynamic-scale-per-token-loss'][0]),
    'scaler_not_restored': _flags(SETUPS['fp16-dynamic-scale-per-token-loss'][0]),
    'moments_not_restored': BASE,
    'step_not_restored': BASE,
    'norm_not_replayed': BASE,
    'frozen_weights_from_wrong_slot': BASE,
    'scheduler_not_restored': BASE,
    'rng_not_restored': _flags(SETUPS['cyclic-data-dropout'][0]),
    'router_bias_not_restored': _flags(SETUPS['router-bias'][0]),
}


@pytest.mark.mutation
@pytest.mark.parametrize('mutation', with_quick(MUTATIONS))
def test_omitting_a_step_of_whole_job_recovery_changes_the_bits(
    mutation: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    flags = MUTATIONS[mutation]
    job = cluster(*flags, '--sparse-ckpt-window', '4')
    job.run(fail_at='1:9:forward')
    job.finish(mutation=mutation)
    assert job.events_of(Recovered)
    assert differences(reference(*flags), read_digest(job)) != []


@pytest.mark.thorough
def test_wrong_bit_after_the_newest_capture_shows_in_loss_and_norm(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3')
    job.run(fail_at='1:7:after-step')
    job.finish(mutation='mutations.localized:one_bit_wrong_after_the_last_capture')
    found = {rank: job.events_of(Recovered, rank)[0].differing for rank in range(4)}
    norm = 'gradient norm from iteration 7'
    assert found == {**dict.fromkeys((0, 1), [norm]), **dict.fromkeys((2, 3), [norm, LOSS])}


@pytest.mark.thorough
def test_whole_job_recovery_can_be_requested(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3', '--sparse-ckpt-recovery', 'whole-job')
    assert set(job.survive(fail_at='1:8:forward')) == {0, 1, 2, 3}
    assert differences(reference(*BASE), read_digest(job)) == []
    assert not job.memory.exists()
