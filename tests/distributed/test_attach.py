# SPDX-License-Identifier: Apache-2.0
"""A hand-written Megatron-Core loop, protected by `megatron.moevement.attach`."""

import re
from collections.abc import Callable

import pytest

from moevement_ext.events import LossLogged, Recovered
from tests.distributed.conftest import Make, differences, digest_of_undisturbed, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import STEPPED

pytestmark = pytest.mark.timeout(900)

ITERATIONS = 14


@pytest.fixture
def own_loop(example: Make, text: list[str]) -> Callable[[], Cluster]:
    return lambda: example('own_loop', '--data', text[1], '--iterations', str(ITERATIONS))


@pytest.fixture
def expected(own_loop: Callable[[], Cluster], undisturbed: dict[str, dict]) -> dict:
    return digest_of_undisturbed(own_loop(), undisturbed)


def test_own_loop_recovers_with_the_bits_of_a_fault_free_run(
    own_loop: Callable[[], Cluster], expected: dict
) -> None:
    """Whatever it draws between steps: a replay repeats steps only."""
    job = own_loop()
    draws = f'{STEPPED},mutations.own_loop:draws_between_steps'
    assert job.survive(fail_at='0:9:optimizer,1:11:norm', mutation=draws) == {0: 1, 1: 1}
    assert differences(expected, read_digest(job)) == []
    for rank in range(3):
        recovered = [event.replayed for event in job.events_of(Recovered, rank)]
        assert any(recovered) == (rank in (0, 1))
    assert [event.iteration for event in job.events_of(LossLogged, 2)] == [10]
    assert not job.events_of(LossLogged, 1)


def test_evaluation_that_a_failure_cuts_off_is_completed(
    own_loop: Callable[[], Cluster], expected: dict
) -> None:
    """And what it draws changes no bit of training."""
    job = own_loop()
    evaluates = 'mutations.own_loop:evaluates_after_steps'
    struck = '1:6:evaluate,0:10:evaluated,2:12:evaluated'
    assert job.survive(fail_at=struck, mutation=evaluates) == {0: 1, 1: 1, 2: 1}
    assert differences(expected, read_digest(job)) == []
    found = re.findall(r'evaluation at iteration (\d+),', job.output(0))
    assert sorted({int(one) for one in found}) == [*range(2, ITERATIONS + 1, 2)]


def test_loop_around_parts_of_bridge_recovers(
    own_loop: Callable[[], Cluster], expected: dict
) -> None:
    """`examples/bridge_loop.py` on stand-ins: the bits of the own loop, which trains the same."""
    job = own_loop()
    job.program = 'tests.distributed.harness.bridge_program'
    assert job.survive(fail_at='1:7:optimizer,2:11:p2p') == {1: 1, 2: 1}
    assert differences(expected, read_digest(job)) == []
    saved = {int(one) for one in re.findall(r'saved iteration (\d+), samples', job.output(0))}
    assert saved == {4, 8, 12}


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


@pytest.mark.parametrize(
    ('mutation', 'message'),
    [
        ('scheduler_counts_iterations', 'moved the scheduler by 1, not 16'),
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
