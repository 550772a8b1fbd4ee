# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8 that Transformer Engine's Adam writes by the scales of their modules.

It keeps masters of 16 or 8 bits beside them: C3, C4 and C5 of the paper. On a CPU stand-ins with
the rules of Transformer Engine's layers and Adam do it (`tests/stand_ins`).
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_localized_recovery import check_both_ways
from tests.support.quick import with_quick
from tools.lab import precisions

VARIANT = 'mutations.masters'
STAND_INS = f'{VARIANT}:masters'
HISTORY = '--fp8-amax-history-len 4 --fp8-amax-compute-algo max --fp8-margin 1'
UNTIED = '--untie-embeddings-and-output-weights'
C2, C3, C4, C5 = (
    f'{precisions.FLAGS[name]} {HISTORY} {UNTIED}' for name in ('c2', 'c3', 'c4', 'c5')
)
# A rank for each stage: upstream leaves the scale of a weight alone on ranks without a part of it.
ALONE = '--pipeline-model-parallel-size 4'
TWO_REPLICAS = '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'
EVALUATIONS = '--pipeline-model-parallel-size 4 --eval-interval 1 --eval-iters 1'

CASES = {
    'c2-delayed': f'{C2} --fp8-recipe delayed {TWO_REPLICAS}',
    'c3': f'{C3} {ALONE}',
    'c4': f'{C4} {ALONE}',
    'c4-two-replicas': f'{C4} {TWO_REPLICAS}',
    'c5': f'{C5} {ALONE}',
}
"""Those of which a stage can replay alone."""
WITH_EVALUATIONS = {
    'c4-evaluations': f'{C4} {EVALUATIONS}',
    'c5-evaluations': f'{C5} {EVALUATIONS}',
}
MUTATIONS = {
    'scales_not_restored': 'c4',
    'scales_of_masters_not_restored': 'c3',
    'weight_scales_not_restored': 'c3',
    'scaling_not_restored': 'c3',
    'weight_from_master': 'c3',
}


def flags_of(case: str) -> list[str]:
    return f'{(CASES | WITH_EVALUATIONS)[case]} --train-iters 12'.split()


@pytest.fixture
def undisturbed(reference: Reference) -> Callable[[str], dict]:
    """The digest of plain Megatron with the flags of a case, that nothing happened to."""
    return lambda case: reference(*flags_of(case), stand_in=STAND_INS, check=check_numbers)


def check_numbers(job: Cluster) -> None:
    """The losses are numbers: where all has become NaN, nothing can differ."""
    losses = re.findall(r'lm loss: +(\S+)', job.output(attempt=0))
    assert len(losses) >= 12 and all(float(loss) < 100 for loss in losses), losses


def check_kinds(case: str, digest: dict) -> None:
    """The state is in the form that the case is named after."""
    kinds = {name.rpartition('/')[0] for name in digest['ranks']['0']}
    kept = {'scaling', 'weight_scale'}
    if case != 'c2-delayed':
        kept |= {'master_param', ('scale_inv' if 'c5' in case else 'scale') + '/master_param'}
    assert kept <= {kind.partition('/')[0] for kind in kinds} | kinds


@pytest.mark.parametrize('case', with_quick(CASES))
def test_fp8_weights_with_narrow_masters_are_recovered(
    case: str, cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    check_kinds(case, undisturbed(case))
    check_both_ways(cluster, flags_of(case), undisturbed(case), STAND_INS)


@pytest.mark.thorough
@pytest.mark.parametrize('case', WITH_EVALUATIONS)
def test_state_changed_by_evaluations_is_recovered(
    case: str, cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    """All workers die; every iteration of the window was followed by an evaluation."""
    job = cluster(*flags_of(case), '--sparse-ckpt-window', '3')
    assert -9 in job.run(fail_at='1:9:forward', mutation=STAND_INS)
    job.finish(mutation=STAND_INS)
    assert job.events_of(Recovered)[0].replayed >= 2
    assert differences(undisturbed(case), read_digest(job)) == []


@pytest.mark.thorough
@pytest.mark.parametrize('case', ('c2', 'c4', 'c5'))
def test_windows_after_a_dense_restart_match_that_restart_bit_for_bit(
    case: str, cluster: Make, tmp_path: Path
) -> None:
    """A dense checkpoint holds what the state stands for: a restart from it rounds all again.

    So does one of plain Megatron, which has the bits to compare with.
    """
    flags = f'{precisions.FLAGS[case]} {UNTIED} {ALONE} --train-iters 12'.split()
    saving = ['--save', str(tmp_path / 'dense'), '--save-interval', '4', '--exit-interval', '4']
    load = ['--load', str(tmp_path / 'dense')]
    cluster(*flags, *saving, sparse=False).finish(mutation=STAND_INS)
    plain = cluster(*flags, *load, sparse=False)
    plain.finish(mutation=STAND_INS)
    assert 'successfully loaded checkpoint' in plain.output(attempt=0)
    lost_at = '1:9:backward', '1:11:forward'
    check_both_ways(cluster, [*flags, *load], read_digest(plain), STAND_INS, lost_at)


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize('mutation', MUTATIONS)
def test_omitting_a_step_for_narrow_masters_changes_the_bits(
    mutation: str, cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    case = MUTATIONS[mutation]
    broken = cluster(*flags_of(case), '--sparse-ckpt-window', '3')
    assert broken.survive(fail_at='1:8:backward', mutation=f'{VARIANT}:{mutation}') == {1: 1}
    assert differences(undisturbed(case), read_digest(broken)) != []
