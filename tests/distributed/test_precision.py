# SPDX-License-Identifier: Apache-2.0
"""Masters and moments of 16 and 8 bits come back as they were stored, with their scales.

On a CPU a stand-in with the state and the rules of Transformer Engine's Adam is what upstream's
precision-aware optimizer runs on (`tests/stand_ins`).
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.setups import setups
from tests.distributed.test_localized_recovery import check_both_ways
from tests.support.quick import with_quick

LAYOUT = """--use-distributed-optimizer --pipeline-model-parallel-size 2
 --expert-model-parallel-size 2 --untie-embeddings-and-output-weights
 --use-precision-aware-optimizer"""
VARIANT = 'mutations.precision'
STAND_IN = f'{VARIANT}:precision_aware'
CASES = setups('precision', LAYOUT=LAYOUT)
"""Flags by what is kept."""
# Without experts on different ranks, whose random numbers upstream does not keep apart there.
DENSE = {
    f'{name}-without-ep': CASES[name].replace('--expert-model-parallel-size 2', '')
    for name in ('fp32-masters-as-remainders', 'fp16-masters-and-evaluation')
}

MUTATIONS = {
    'scales_not_restored': 'fp16-masters-fp8-and-fp16-moments',
    'weight_from_master': 'fp16-masters-fp8-and-fp16-moments',
    'remainders_not_restored': 'fp32-masters-as-remainders',
}


def flags_of(case: str) -> list[str]:
    return f'{(CASES | DENSE)[case]} --train-iters 12'.split()


@pytest.fixture
def undisturbed(reference: Reference) -> Callable[[str], dict]:
    """The digest of a case that nothing happened to."""
    return lambda case: reference(*flags_of(case), stand_in=STAND_IN)


@pytest.mark.parametrize('case', with_quick(CASES))
def test_low_precision_state_is_recovered(
    case: str, cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    local = check_both_ways(cluster, flags_of(case), undisturbed(case), STAND_IN)
    if case == 'fp16-everywhere':
        assert 5 in skipped(local), 'one that is replayed'


def skipped(job: Cluster) -> set[int]:
    """Iterations of which some rank says that their step was skipped."""
    pattern = r'iteration +(\d+)/.*skipped iterations: +[1-9]'
    return {int(found[1]) for found in re.finditer(pattern, job.output(attempt=0))}


@pytest.mark.thorough
@pytest.mark.parametrize('case', DENSE)
def test_low_precision_windows_after_a_dense_restart_are_recovered(
    case: str, cluster: Make, undisturbed: Callable[[str], dict], tmp_path: Path
) -> None:
    """A dense checkpoint holds what the state stands for; of fp8, that may be rounded once more."""
    dense = ['--save', str(tmp_path / 'dense'), '--load', str(tmp_path / 'dense')]
    flags = [*flags_of(case), *dense, '--save-interval', '4', '--sparse-ckpt-window', '3']
    job = cluster(*flags)
    assert -9 in job.run(fail_at='1:6:forward', mutation=STAND_IN)
    shutil.rmtree(job.memory)
    assert -9 in job.run(fail_at='1:11:forward', mutation=STAND_IN)
    assert 'loaded checkpoint' in job.output(attempt=1)
    job.finish(mutation=STAND_IN)
    assert job.events_of(Recovered)[0].replayed >= 2
    assert differences(undisturbed(case), read_digest(job)) == []


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize('mutation', MUTATIONS)
def test_omitting_a_step_for_low_precision_changes_the_bits(
    mutation: str, cluster: Make, undisturbed: Callable[[str], dict]
) -> None:
    case = MUTATIONS[mutation]
    broken = cluster(*flags_of(case), '--sparse-ckpt-window', '3')
    broken.run(fail_at='1:9:forward', mutation=STAND_IN)
    broken.finish(mutation=f'{VARIANT}:{mutation}')
    assert broken.events_of(Recovered)
    assert differences(undisturbed(case), read_digest(broken)) != []
