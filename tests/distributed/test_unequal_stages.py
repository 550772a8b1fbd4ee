# SPDX-License-Identifier: Apache-2.0
"""Stages hold different kinds of parameters, so that their optimizers differ by what they hold."""

import pytest

from tests.distributed.conftest import ON_BOTH_BACKENDS, Make, Reference
from tests.distributed.test_localized_recovery import check_localized, victims
from tests.support.quick import with_quick

pytestmark = ON_BOTH_BACKENDS

UNTIED = '--untie-embeddings-and-output-weights --train-iters 12'
NO_EXPERTS_FIRST = (
    f'--bf16 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {UNTIED} '
    '--moe-layer-freq [0,0,1,1]'
)
OTHER_RATE_AT_THE_ENDS = (
    f'--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 4 {UNTIED} '
    '--decoupled-lr 1e-3 --decoupled-min-lr 1e-4'
)
CASES = {
    'stage without experts': (NO_EXPERTS_FIRST, '0:9:forward,1:9:forward'),
    'stage with experts': (NO_EXPERTS_FIRST, '2:9:backward,3:9:backward'),
    'stage without embedding': (OTHER_RATE_AT_THE_ENDS, '1:9:forward'),
}


@pytest.mark.thorough
@pytest.mark.parametrize('case', with_quick(CASES, 'stage without experts'))
def test_replacement_has_the_lost_workers_parameter_groups(
    case: str, cluster: Make, reference: Reference
) -> None:
    setup, fail_at = CASES[case]
    flags = setup.split()
    job = cluster(*flags, '--sparse-ckpt-window', '3', nodes=4)
    assert job.survive(fail_at=fail_at) == victims(fail_at)
    check_localized(job, reference(*flags))
