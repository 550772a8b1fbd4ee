# SPDX-License-Identifier: Apache-2.0
"""Jobs that compute in fp8; with delayed scaling every slot restores their scales.

On a CPU stand-ins with the rules of Transformer Engine's layers do it (`tests/stand_ins`).
"""

from collections.abc import Callable

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.setups import setups
from tests.distributed.test_localized_recovery import check_localized
from tests.support.quick import with_quick

LAYOUT = """--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2
 --expert-model-parallel-size 2 --untie-embeddings-and-output-weights"""
STAND_IN = 'mutations.fp8:fp8'
HISTORY = '--fp8-amax-history-len 4 --fp8-amax-compute-algo max --fp8-margin 1'
EVALUATIONS = '--eval-interval 1 --eval-iters 2'

CASES = setups('fp8', LAYOUT=LAYOUT, HISTORY=HISTORY, EVALUATIONS=EVALUATIONS)
"""Those of which a stage can replay alone."""
# Two ranks of one stage, whose largest values differ after an evaluation.
WITH_EVALUATIONS = (
    '--bf16 --use-distributed-optimizer --expert-model-parallel-size 2 '
    f'--untie-embeddings-and-output-weights --fp8-format hybrid {HISTORY} '
    '--eval-interval 1 --eval-iters 1'
)
DIES = '1:7:forward'
REPLICATED = (
    '--bf16 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights '
    f'--fp8-format hybrid --fp8-recipe delayed {HISTORY}'
)


def flags_of(setup: str) -> list[str]:
    return f'{setup} --train-iters {8 if setup == WITH_EVALUATIONS else 12}'.split()


def ranks_of(setup: str) -> int:
    return 2 if setup == WITH_EVALUATIONS else 4


@pytest.fixture
def undisturbed(reference: Reference) -> Callable[[str], dict]:
    """The digest of plain Megatron with these flags, that nothing happened to."""
    return lambda setup: reference(*flags_of(setup), ranks=ranks_of(setup), stand_in=STAND_IN)


@pytest.mark.parametrize('case', with_quick(CASES))
def test_fp8_computation_is_recovered(
    case: str, cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    """By the lost stage alone."""
    job = cluster(*flags_of(CASES[case]), '--sparse-ckpt-window', '3')
    assert job.survive(fail_at='1:8:backward', mutation=STAND_IN) == {1: 1}
    check_localized(job, undisturbed(CASES[case]))
    kinds = {name.partition('/')[0] for name in undisturbed(CASES[case])['ranks']['0']}
    assert ('scaling' in kinds) is case.startswith('delayed')
    assert ('weight_scale' in kinds) is case.startswith('weights')


@pytest.mark.thorough
def test_scales_changed_by_evaluations_are_recovered(
    cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    """All workers die; every iteration of the window was followed by an evaluation."""
    job = cluster(*flags_of(WITH_EVALUATIONS), '--sparse-ckpt-window', '3', ranks=2)
    assert -9 in job.run(fail_at=DIES, mutation=STAND_IN)
    job.finish(mutation=STAND_IN)
    recovered = job.events_of(Recovered)[0]
    assert recovered.replayed >= 2 and recovered.verified and not recovered.differing
    assert differences(undisturbed(WITH_EVALUATIONS), read_digest(job)) == []


@pytest.mark.thorough
def test_scales_are_copied_from_a_data_parallel_replica(
    cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    job = cluster(*flags_of(REPLICATED), '--sparse-ckpt-window', '3')
    assert job.survive(fail_at='1:8:backward', mutation=STAND_IN) == {1: 1}
    assert differences(undisturbed(REPLICATED), read_digest(job)) == []
    assert job.events_of(Recovered, rank=1)[0].replayed == 0


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize('mutation', ['scaling_not_restored', 'scaling_captured_once'])
def test_omitting_a_step_for_delayed_scaling_changes_the_bits(
    mutation: str, cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    broken = cluster(*flags_of(WITH_EVALUATIONS), '--sparse-ckpt-window', '3', ranks=2)
    broken.run(fail_at=DIES, mutation=f'mutations.fp8:{mutation}')
    broken.finish(mutation=f'mutations.fp8:{mutation}')
    assert broken.events_of(Recovered)
    assert differences(undisturbed(WITH_EVALUATIONS), read_digest(broken)) != []


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize('mutation', ['weight_scales_not_restored', 'weights_from_masters'])
def test_omitting_a_step_for_fp8_weights_changes_the_bits(
    mutation: str, cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    case = CASES['weights-tensorwise']
    broken = cluster(*flags_of(case), '--sparse-ckpt-window', '3')
    broken.survive(fail_at='1:8:backward', mutation=f'mutations.fp8:{mutation}')
    assert differences(undisturbed(case), read_digest(broken)) != []


@pytest.mark.mutation
@pytest.mark.thorough
def test_scales_not_rolled_back_on_survivors_change_the_bits(
    cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    case = CASES['delayed']
    broken = cluster(*flags_of(case), '--sparse-ckpt-window', '3')
    broken.survive(fail_at='1:8:backward', mutation='mutations.fp8:scaling_not_rolled_back')
    assert differences(undisturbed(case), read_digest(broken)) != []
