# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a chain whose overflow flags, and so their loss scales, differ.

Upstream skips the step of all, but lowers the scale of those alone that saw an overflow; the loss
is multiplied by the scale of the first.
"""

import re

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import ON_BOTH_BACKENDS, Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_localized_recovery import check_localized

pytestmark = ON_BOTH_BACKENDS

VARIANT = 'mutations.chained'
OVERFLOW = f'{VARIANT}:experts_overflow'
FLAGS = """--fp16 --initial-loss-scale 1024 --loss-scale-window 1000 --hysteresis 1
 --use-distributed-optimizer --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
 --untie-embeddings-and-output-weights --train-iters 12""".split()
FAILS = '1:8:forward'
"""The window of iterations 3 to 5 is loaded, and 6 and 7 follow: one overflow is in either part."""


@pytest.fixture
def undisturbed(reference: Reference) -> dict:
    return reference(*FLAGS, stand_in=OVERFLOW, check=check_skips)


def check_skips(plain: Cluster) -> None:
    assert skipped(plain) == {5, 7}


def skipped(job: Cluster) -> set[int]:
    """Iterations whose step was skipped; the scale of the first optimizer stays what it was."""
    lines = re.findall(r'iteration +(\d+)/.*loss scale: +(\S+) .*skipped iterations: +(\d)',
                       job.output(attempt=0))  # fmt: skip
    assert lines and {float(scale) for _, scale, _ in lines} == {1024.0}
    return {int(number) for number, _, count in lines if int(count)}


@pytest.mark.thorough
def test_chained_optimizers_recover_their_own_overflow_flags_and_scales(
    cluster: Make, undisturbed: dict
) -> None:
    job = cluster(*FLAGS, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at=FAILS, mutation=OVERFLOW) == {1: 1}
    check_localized(job, undisturbed)


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize('mutation', ['flag_of_any_for_all', 'scale_of_the_second_not_restored'])
def test_treating_chained_optimizers_as_one_changes_the_bits(
    mutation: str, cluster: Make, undisturbed: dict
) -> None:
    broken = cluster(*FLAGS, '--sparse-ckpt-window', '3')
    assert broken.survive(fail_at=FAILS, mutation=f'{VARIANT}:{mutation}') == {1: 1}
    assert broken.events_of(Recovered)
    assert differences(undisturbed, read_digest(broken)) != []
