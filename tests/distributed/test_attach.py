# SPDX-License-Identifier: Apache-2.0
"""A hand-written Megatron-Core loop, protected by `megatron.moevement.attach`."""

from collections.abc import Callable

import pytest

from moevement_ext.events import LossLogged, NextTier, Recovered
from tests.distributed.conftest import (
    differences,
    digest_of_undisturbed,
    read_digest,
)
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import STEPPED

pytestmark = pytest.mark.timeout(900)

ITERATIONS = 14


@pytest.fixture
def own_loop(example: Callable[..., Cluster], text: list[str]) -> Callable[[], Cluster]:
    """Makes jobs of the example."""
    return lambda: example('own_loop', '--data', text[1], '--iterations', str(ITERATIONS))


@pytest.fixture
def expected(own_loop: Callable[[], Cluster], undisturbed: dict[str, dict]) -> dict:
    return digest_of_undisturbed(own_loop(), undisturbed)


@pytest.mark.parametrize(
    ('fail_at', 'replayed', 'logged'),
    [
        # The middle stage, within the pipeline.
        pytest.param('1:11:p2p', {'1'}, [10], marks=pytest.mark.thorough),
        # The last one, in the update: it dies before it logs the loss of an iteration that counts.
        pytest.param('2:10:step', {'2'}, [], marks=pytest.mark.thorough),
        ('0:9:optimizer,1:11:norm', {'0', '1'}, [10]),
    ],
)
def test_own_loop_recovers_with_the_bits_of_a_fault_free_run(
    fail_at: str,
    replayed: set[str],
    logged: list[int],
    own_loop: Callable[[], Cluster],
    expected: dict,
) -> None:
    job = own_loop()
    victims = {int(place.split(':')[0]): 1 for place in fail_at.split(',')}
    assert job.survive(fail_at=fail_at, mutation=STEPPED) == victims
    assert differences(expected, read_digest(job)) == []
    for rank in range(3):
        recovered = [event.replayed for event in job.events_of(Recovered, rank)]
        assert any(recovered) == (str(rank) in replayed)
    assert [event.iteration for event in job.events_of(LossLogged, 2)] == logged
    assert not job.events_of(LossLogged, 1)


@pytest.mark.thorough
def test_lost_node_of_an_own_loop_is_recovered_from_replicas(
    own_loop: Callable[[], Cluster], expected: dict
) -> None:
    job = own_loop()
    assert job.survive(fail_at='1:10:p2p', wipe=[1]) == {1: 1}
    assert differences(expected, read_digest(job)) == []
    assert [event.stages for event in job.events_of(Recovered)] == [[1]]


@pytest.mark.thorough
def test_random_draws_between_steps_do_not_change_the_bits(
    own_loop: Callable[[], Cluster], expected: dict
) -> None:
    """A replay repeats steps only."""
    job = own_loop()
    draws = 'mutations.own_loop:draws_between_steps'
    assert job.survive(fail_at='1:11:p2p', mutation=draws) == {1: 1}
    assert differences(expected, read_digest(job)) == []


@pytest.mark.mutation
@pytest.mark.thorough
def test_data_not_moved_back_changes_the_bits(
    own_loop: Callable[[], Cluster], expected: dict
) -> None:
    job = own_loop()
    job.survive(fail_at='0:11:p2p', mutation='mutations.localized:own_data_not_moved_back')
    assert differences(expected, read_digest(job)) != []


@pytest.mark.thorough
@pytest.mark.parametrize('formats', ['c1', 'c2', 'c3', 'c4', 'c5'])
def test_narrow_state_of_an_own_loop_is_recovered(
    formats: str, own_loop: Callable[[], Cluster], expected: dict
) -> None:
    narrow = f'mutations.own_loop:{formats}'
    plain, local, whole = own_loop(), own_loop(), own_loop()
    assert plain.survive(mutation=narrow) == {}
    exact = read_digest(plain)
    assert exact['digest'] != expected['digest'], 'formats are narrow indeed'
    assert local.survive(fail_at='1:11:p2p', mutation=narrow) == {1: 1}
    assert differences(exact, read_digest(local)) == []
    assert whole.run(fail_at='1:11:norm', mutation=narrow)[1] == -9
    whole.finish(mutation=narrow)
    assert whole.events_of(Recovered)[0].replayed > 0
    assert differences(exact, read_digest(whole)) == []


@pytest.mark.mutation
@pytest.mark.thorough
def test_scales_not_restored_change_the_bits(own_loop: Callable[[], Cluster]) -> None:
    plain, broken = own_loop(), own_loop()
    assert plain.survive(mutation='mutations.own_loop:c5') == {}
    broken.survive(fail_at='1:11:p2p', mutation='mutations.own_loop:scales_not_restored')
    assert differences(read_digest(plain), read_digest(broken)) != []


@pytest.mark.thorough
def test_own_loop_recovers_the_whole_job_from_host_memory(
    own_loop: Callable[[], Cluster], expected: dict
) -> None:
    job = own_loop()
    codes = job.run(fail_at='1:11:norm')
    assert codes[1] == -9
    assert {codes[0], codes[2]} <= {-9, 1}  # they may notice before they are killed
    job.finish()
    assert job.events_of(Recovered)[0].replayed > 0
    assert differences(expected, read_digest(job)) == []


@pytest.mark.thorough
def test_death_after_the_last_iteration_restarts_the_whole_job(
    own_loop: Callable[[], Cluster], expected: dict
) -> None:
    """The survivors have left the loop, and fail in what they do together after it."""
    job = own_loop()
    assert set(job.survive(fail_at='1:14:after-step')) == {0, 1, 2}
    assert differences(expected, read_digest(job)) == []
    for rank in (0, 2):
        (fallback,) = job.events_of(NextTier, rank)
        assert fallback.tier == 'the whole job'


@pytest.mark.parametrize(
    ('mutation', 'message'),
    [
        ('scheduler_counts_iterations', 'moved the scheduler by 1, not 16'),
        pytest.param(
            'scheduler_stands_still', 'moved the scheduler by 0, not 16', marks=pytest.mark.thorough
        ),
        pytest.param(
            'optimizer_steps_twice', 'called optimizer.step() 2 times', marks=pytest.mark.thorough
        ),
    ],
)
def test_loop_with_unsupported_steps_is_refused(
    mutation: str, message: str, own_loop: Callable[[], Cluster]
) -> None:
    job = own_loop()
    codes = job.run(mutation=f'mutations.localized:{mutation}')
    assert 1 in codes
    assert message in job.output(0)
