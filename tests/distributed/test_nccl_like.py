# SPDX-License-Identifier: Apache-2.0
"""Localized recovery where collectives fail as those of NCCL do (see `harness/nccl_like.py`).

With `--thorough` those tests of localized recovery that are `ON_BOTH_BACKENDS` run on it, too.
"""

from collections.abc import Callable

import pytest

from moevement_ext.events import WindowPersisted
from tests.distributed.conftest import Reference, differences, read_digest
from tests.distributed.harness.cluster import NCCL_LIKE, Cluster
from tests.distributed.test_localized_recovery import (
    BASE,
    UNTIED,
    check_localized,
    flags_of,
    victims,
)

pytestmark = pytest.mark.thorough


# No collective within a stage, nor after the norm, that would raise and hide what comes before.
PLAIN = f'--bf16 --pipeline-model-parallel-size 4 {UNTIED}'
DEATHS = {
    'others wait in the norm': (PLAIN, '1:9:optimizer'),
    'others send and receive': (PLAIN, '1:8:p2p'),
    'others gather parameters': (BASE, '0:9:step'),
}
Make = Callable[[str], Cluster]


@pytest.fixture
def make(cluster: Callable[..., Cluster]) -> Make:
    return lambda setup: cluster(*flags_of(setup), '--sparse-ckpt-window', '3', backend=NCCL_LIKE)


def check_death(job: Cluster, expected: dict, fail_at: str, mutation: str) -> None:
    """Only the hit rank dies while all others wait, and only its stage replays."""
    assert job.survive(fail_at=fail_at, mutation=f'mutations.nccl_like:{mutation}') == victims(
        fail_at
    )
    check_localized(job, expected)


@pytest.mark.parametrize('death', DEATHS)
def test_garbage_from_aborted_collectives_is_discarded(
    death: str, make: Make, reference: Reference
) -> None:
    setup, fail_at = DEATHS[death]
    expected = reference(*flags_of(setup))
    check_death(make(setup), expected, fail_at, 'all_others_wait_when_one_dies')


@pytest.mark.mutation
def test_undetected_garbage_gives_wrong_bits(make: Make, reference: Reference) -> None:
    setup, fail_at = DEATHS['others wait in the norm']
    job = make(setup)
    job.survive(fail_at=fail_at, mutation='mutations.nccl_like:garbage_is_not_looked_for')
    assert differences(reference(*flags_of(setup)), read_digest(job)) != []


@pytest.mark.mutation
@pytest.mark.parametrize('mutation', ['groups_of_calls_stay_open', 'aborts_one_after_the_other'])
def test_omitting_a_step_for_nccl_breaks_recovery(
    mutation: str, make: Make, reference: Reference
) -> None:
    """By ranks that fail or hang, or by all that start again."""
    setup, fail_at = DEATHS['others send and receive']
    job, expected = make(setup), reference(*flags_of(setup))
    with pytest.raises((AssertionError, RuntimeError, TimeoutError)):
        check_death(job, expected, fail_at, mutation)
    assert job.events_of(WindowPersisted), 'what is left out does not matter before'
