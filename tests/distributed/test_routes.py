# SPDX-License-Identifier: Apache-2.0
"""Peers compute the micro-batches of guests, with the bits of a run that has none."""

import pytest

from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_whole_job_recovery import BF16, ITERATIONS, UNTIED

# The last rank is a guest, in the iterations of all attempts.
GUEST = 'probes.guests:last_rank'
DRAWING = (
    f'{UNTIED} --hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 12 --num-layers 2'
)
SHARDED = f'{BF16} {DRAWING}'
EP2 = f'{SHARDED} --expert-model-parallel-size 2 --moe-z-loss-coeff 1e-3'
PIPELINE = '--pipeline-model-parallel-size 2'
LAYOUTS = {
    'units-of-two': EP2,
    'pipeline': f'{SHARDED} {PIPELINE}',
    'overlapped-reductions': f'{SHARDED} --overlap-grad-reduce --overlap-param-gather',
    'optimizer-not-sharded': f'--bf16 {DRAWING}',
    'loss-per-token-and-router-bias': f'{SHARDED} --calculate-per-token-loss '
    '--moe-router-enable-expert-bias --moe-router-score-function sigmoid',
}
# In a piece of the guest's micro-batches, and while the guest waits; and the host's last one.
FAULTS = ('1:8:forward', '0:9:backward', '3:9:reduce')


def check(job: Cluster, expected: dict) -> None:
    assert differences(expected, read_digest(job)) == []
    assert 'ranks [3] are guests; their peers compute their micro-batches' in job.output(0)


@pytest.mark.parametrize(
    'layout', [pytest.param(one, marks=pytest.mark.thorough) for one in LAYOUTS]
)
def test_peers_compute_for_guests(layout: str, cluster: Make, reference: Reference) -> None:
    flags = f'{LAYOUTS[layout]} {ITERATIONS}'.split()
    more = ['--sparse-ckpt-recovery', 'global'] if PIPELINE in LAYOUTS[layout] else []
    job = cluster(*flags, *more, '--sparse-ckpt-window', '3')
    assert job.survive(mutation=GUEST, fail_at='0:8:forward') == {0: 1}
    check(job, reference(*flags))


@pytest.mark.parametrize(
    'fault', [FAULTS[0], *(pytest.param(one, marks=pytest.mark.thorough) for one in FAULTS[1:])]
)
def test_failure_beside_a_guest(fault: str, cluster: Make, reference: Reference) -> None:
    flags = f'{SHARDED} {ITERATIONS}'.split()
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(mutation=GUEST, fail_at=fault) == {int(fault[0]): 1}
    check(job, reference(*flags))


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize(
    'mutation',
    [
        'sums_handed_on_before_the_piece',
        'random_state_not_handed_on',
        'divisor_of_the_piece',
        'other_order_of_hosts',
        'piece_on_stale_weights',
    ],
)
def test_broken_routes_turn_bits_red(mutation: str, cluster: Make, reference: Reference) -> None:
    flags = f'{SHARDED} {ITERATIONS}'.split()
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    assert job.survive(mutation=f'mutations.routes:{mutation}') == {}
    assert differences(reference(*flags), read_digest(job)) != []
