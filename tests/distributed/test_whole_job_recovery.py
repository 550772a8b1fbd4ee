# SPDX-License-Identifier: Apache-2.0
"""The whole job is SIGKILLed and started again; at the end every bit equals the fault-free run."""

import re

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import LINES, Make, Reference, differences, read_digest
from tests.support.quick import with_quick

BF16 = '--bf16 --use-distributed-optimizer'
PP_EP = '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'
UNTIED = '--untie-embeddings-and-output-weights'
ITERATIONS = '--train-iters 12'
BASE = f'{BF16} {PP_EP} {UNTIED} {ITERATIONS}'.split()

FP16_HYSTERESIS = (
    '--fp16 --initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 2 --min-loss-scale 2048 '
    f'--use-distributed-optimizer {PP_EP} {UNTIED} --calculate-per-token-loss --global-batch-size 8'
)

# The scale grows every second step, so iterations 5 and 7, both replayed, overflow and skip.
SKIPS = (
    '--fp16 --initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 1 '
    f'--use-distributed-optimizer {PP_EP} {UNTIED} --calculate-per-token-loss --global-batch-size 8'
)
ROUTER_BIAS = (
    f'{BF16} {PP_EP} {UNTIED} --moe-router-enable-expert-bias --moe-router-score-function sigmoid '
    '--moe-router-bias-update-rate 1e-2'
)
CYCLIC = (
    f'{BF16} {PP_EP} {UNTIED} --dataloader-type cyclic --hidden-dropout 0.1 --eval-interval 4 '
    '--eval-iters 2'
)
# Precision and features; window; where it dies. Campaigns of `tools.chaos` draw other layouts.
SETUPS = {
    'fp16-dynamic-scale-per-token-loss': (SKIPS, 4, '1:9:forward'),
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
}
SKIPPED = {
    'fp16-dynamic-scale-per-token-loss': {5, 7},
    'fp16-hysteresis-skips-on-both-sides': {5, 6},
}
"""Iterations that are skipped, by what upstream says of a run without faults."""


def _flags(setup: str) -> list[str]:
    return f'{setup} {ITERATIONS}'.split()


@pytest.mark.parametrize('name', with_quick(SETUPS))
def test_recovered_run_has_the_bits_of_a_fault_free_run(
    name: str, cluster: Make, reference: Reference
) -> None:
    setup, window, fail_at = SETUPS[name]
    flags = _flags(setup)
    job = cluster(*flags, '--sparse-ckpt-window', str(window))
    codes = job.run(fail_at=fail_at)
    assert -9 in codes
    job.finish()
    expected = reference(*flags)
    assert SKIPPED.get(name, set()) <= skipped_by('\n'.join(expected[LINES]))
    assert differences(expected, read_digest(job)) == []
    (recovered,) = job.events_of(Recovered)
    assert recovered.replayed >= window - 1
    assert not job.memory.exists(), 'host memory is given back at a clean exit'


def skipped_by(output: str) -> set[int]:
    """Iterations whose step was skipped, by upstream's lines."""
    lines = re.finditer(r'iteration +(\d+)/.*skipped iterations: +[1-9]', output)
    return {int(found[1]) for found in lines}


LOSS = 'loss from iteration 7'
MUTATIONS = {
    'overflow_not_replayed': _flags(SKIPS),
    'scaler_not_restored': _flags(SKIPS),
    'moments_not_restored': BASE,
    'step_not_restored': BASE,
    'norm_not_replayed': BASE,
    'frozen_weights_from_wrong_slot': BASE,
    'scheduler_not_restored': BASE,
    'rng_not_restored': _flags(CYCLIC),
    'router_bias_not_restored': _flags(ROUTER_BIAS),
}


@pytest.mark.mutation
@pytest.mark.parametrize('mutation', with_quick(MUTATIONS))
def test_omitting_a_step_of_whole_job_recovery_changes_the_bits(
    mutation: str, cluster: Make, reference: Reference
) -> None:
    flags = MUTATIONS[mutation]
    job = cluster(*flags, '--sparse-ckpt-window', '4')
    job.run(fail_at='1:9:forward')
    job.finish(mutation=mutation)
    assert job.events_of(Recovered)
    assert differences(reference(*flags), read_digest(job)) != []


@pytest.mark.thorough
def test_wrong_bit_after_the_newest_capture_shows_in_loss_and_norm(cluster: Make) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3')
    job.run(fail_at='1:7:after-step')
    job.finish(mutation='mutations.localized:one_bit_wrong_after_the_last_capture')
    found = {rank: job.events_of(Recovered, rank)[0].differing for rank in range(4)}
    norm = 'gradient norm from iteration 7'
    assert found == {**dict.fromkeys((0, 1), [norm]), **dict.fromkeys((2, 3), [norm, LOSS])}
