# SPDX-License-Identifier: Apache-2.0
"""A loop on plain torch, without Megatron: a second trainer behind the protocol of the engine."""

from collections.abc import Callable

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import Make, differences, digest_of_undisturbed, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import SEALED

pytestmark = pytest.mark.timeout(900)

ITERATIONS = 16


@pytest.fixture
def pipeline_loop(example: Make, text: list[str]) -> Callable[[], Cluster]:
    return lambda: example(
        'pipeline_loop', '--text', f'{text[1]}.bin', '--iterations', str(ITERATIONS)
    )


@pytest.fixture
def expected(pipeline_loop: Callable[[], Cluster], undisturbed: dict[str, dict]) -> dict:
    return digest_of_undisturbed(pipeline_loop(), undisturbed)


def test_plain_torch_loop_recovers_with_the_same_bits(
    pipeline_loop: Callable[[], Cluster], expected: dict
) -> None:
    """Two stages die in turn, one again in its recovery."""
    job = pipeline_loop()
    fail_at = '0:9:seal,1:11:seal,1:10:catch-up:1'
    assert job.survive(fail_at=fail_at, mutation=SEALED) == {0: 1, 1: 2}
    assert differences(expected, read_digest(job)) == []
    assert {stage for event in job.events_of(Recovered) for stage in event.stages} == {0, 1}


@pytest.mark.thorough
def test_lost_node_of_a_plain_torch_loop_is_recovered_from_replicas(
    pipeline_loop: Callable[[], Cluster], expected: dict
) -> None:
    """Then a second node is lost, which holds the replicas of the first."""
    job = pipeline_loop()
    assert job.survive(fail_at='1:8:seal,2:12:capture', wipe=[1, 2]) == {1: 1, 2: 1}
    assert differences(expected, read_digest(job)) == []
    assert [event.stages for event in job.events_of(Recovered)] == [[1], [2]]


def test_plain_torch_loop_recovers_the_whole_job(
    pipeline_loop: Callable[[], Cluster], expected: dict
) -> None:
    job = pipeline_loop()
    assert -9 in job.run(fail_at='1:11:seal', mutation=SEALED)
    job.finish()
    assert job.events_of(Recovered)[0].replayed > 0
    assert differences(expected, read_digest(job)) == []


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize(
    'mutation',
    [
        'norm_computed_by_a_stage_alone',
        'random_numbers_not_restored',
        'frozen_weights_not_loaded',
    ],
)
def test_omitting_a_step_of_recovery_changes_the_bits(
    mutation: str, pipeline_loop: Callable[[], Cluster], expected: dict
) -> None:
    job = pipeline_loop()
    job.survive(fail_at='1:11:seal', mutation=f'mutations.pipeline_loop:{mutation}')
    assert differences(expected, read_digest(job)) != []
