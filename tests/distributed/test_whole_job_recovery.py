# SPDX-License-Identifier: Apache-2.0
"""The whole job is SIGKILLed and started again; at the end every bit equals the fault-free run.

A recovery that computes other bits ends the job, and the next start has the right bits.
"""

import re

import pytest

from moevement_ext.errors import EXIT_OTHER_BITS
from moevement_ext.events import NextTier, Recovered, RecoveryStarted
from tests.distributed.conftest import LINES, Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.setups import BF16, PP_EP, UNTIED, setups
from tests.support.quick import with_quick

ITERATIONS = '--train-iters 12'
BASE = f'{BF16} {PP_EP} {UNTIED} {ITERATIONS}'.split()

# Precision and features; window; where it dies. Campaigns of `tools.chaos` draw other layouts.
SETUPS = setups('whole-job')
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
    flags, window = _flags(SETUPS[name]['flags']), SETUPS[name]['window']
    job = cluster(*flags, '--sparse-ckpt-window', str(window))
    codes = job.run(fail_at=SETUPS[name]['dies'])
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
MUTATIONS = setups('whole-job-mutations')


@pytest.mark.mutation
@pytest.mark.parametrize('mutation', with_quick(MUTATIONS))
def test_omitting_a_step_of_whole_job_recovery_changes_the_bits(
    mutation: str, cluster: Make, reference: Reference
) -> None:
    flags = _flags(MUTATIONS[mutation])
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


STOP = ['--sparse-ckpt-verify', 'stop']


def check_ended(job: Cluster, expected: dict) -> None:
    """A chip is replaced: another start goes on from the windows, and finds nothing wrong."""
    named = rf'ends with exit status {EXIT_OTHER_BITS}, .* differing: [1-9]\d* \(\w'
    assert re.search(named, job.output(job.attempts - 1))
    job.finish()
    assert differences(expected, read_digest(job)) == []
    for rank in range(job.ranks):
        assert job.events_of(RecoveryStarted, rank)
        assert 'the start' not in [event.tier for event in job.events_of(NextTier, rank)]


@pytest.mark.mutation
@pytest.mark.thorough
def test_refused_replay_of_a_stage_ends_the_job(cluster: Make, reference: Reference) -> None:
    """The one before was not refused."""
    job = cluster(*BASE, '--sparse-ckpt-window', '3', *STOP)
    mutation = 'mutations.localized:one_bit_wrong_in_the_first_replay_of_rank_3'
    job.survive(fail_at='1:6:backward,3:10:backward', mutation=mutation)
    check_ended(job, reference(*BASE))


@pytest.mark.mutation
@pytest.mark.thorough
def test_refused_start_of_the_whole_job_ends_it(cluster: Make, reference: Reference) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '2', *STOP)
    assert -9 in job.run(fail_at='1:9:backward')
    codes = job.run(mutation='mutations.localized:one_bit_wrong_on_rank_0', all_end=True)
    assert codes == [EXIT_OTHER_BITS] * job.ranks
    check_ended(job, reference(*BASE))
