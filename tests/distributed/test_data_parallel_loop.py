# SPDX-License-Identifier: Apache-2.0
"""A data-parallel loop on plain torch: a lost rank takes the state of another one."""

import re
from collections.abc import Callable

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import Make, differences, digest_of_undisturbed, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import SEALED, STEPPED

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def loop(example: Make, text: list[str]) -> Callable[[], Cluster]:
    flags = ['--text', f'{text[1]}.bin', '--iterations', '16', '--eval-interval', '1']
    return lambda: example('data_parallel_loop', *flags)


@pytest.fixture
def expected(loop: Callable[[], Cluster], undisturbed: dict[str, dict]) -> dict:
    job = loop()
    digest = digest_of_undisturbed(job, undisturbed)
    if job.attempts:
        undisturbed['evaluations'] = evaluations(job)
    return digest


def test_lost_rank_copies_its_state_from_a_peer_bit_for_bit(
    loop: Callable[[], Cluster], expected: dict
) -> None:
    job = loop()
    assert job.survive(fail_at='1:9:norm,0:12:after-step', mutation=STEPPED) == {0: 1, 1: 1}
    assert differences(expected, read_digest(job)) == []
    assert [event.copied for event in job.events_of(Recovered, 2)] == [[1], [0]]


EVALUATIONS = re.compile(r' evaluation at iteration .* \|')


def evaluations(job: Cluster) -> set[str]:
    return {line for attempt in range(2) for line in EVALUATIONS.findall(job.output(attempt))}


@pytest.mark.parametrize('whole_job', [False, True])
def test_evaluation_that_a_failure_cuts_off_is_completed(
    whole_job: bool, loop: Callable[[], Cluster], expected: dict, undisturbed: dict
) -> None:
    """Whether some rank has died in it, or after it.

    Windows lead a whole job to an earlier iteration: a state is captured in the one that follows.
    """
    job = loop()
    assert len(undisturbed['evaluations']) == 16
    if whole_job:
        assert -9 in job.run(fail_at='1:12:evaluate', mutation=SEALED)
        job.finish()
        assert job.events_of(Recovered)[0].replayed > 0
    else:
        struck = '1:6:evaluate,0:10:evaluated,2:13:evaluated'
        assert job.survive(fail_at=struck) == {0: 1, 1: 1, 2: 1}
    assert evaluations(job) == undisturbed['evaluations']
    assert differences(expected, read_digest(job)) == []


@pytest.mark.thorough
@pytest.mark.parametrize('mutation', ['none', pytest.param('copies', marks=pytest.mark.mutation)])
def test_ranks_that_draw_by_their_data_replay(mutation: str, loop: Callable[[], Cluster]) -> None:
    """Their generators are equal at the start only."""
    draws = 'mutations.data_parallel_loop:draws_by_data'
    plain, job = loop(), loop()
    assert plain.survive(mutation=draws) == {}
    copies = mutation == 'copies'
    assert job.survive(fail_at='1:9:norm', mutation=draws + copies * '_and_copies') == {1: 1}
    assert job.events_of(Recovered, 2)[0].copied == ([1] if copies else [])
    assert (differences(read_digest(plain), read_digest(job)) != []) is copies


@pytest.mark.parametrize('survives', [False, True])
def test_worker_killed_after_the_job_costs_nothing(
    survives: bool, loop: Callable[[], Cluster], expected: dict
) -> None:
    """The windows stay until all processes have ended well."""
    job, killed = loop(), 'mutations.data_parallel_loop:killed_after_the_job'
    if survives:
        assert job.survive(mutation=killed) == dict.fromkeys(range(job.ranks), 1)
    else:
        assert job.run(mutation=killed)[1] == -9
        job.finish(mutation=killed)
    assert job.events_of(Recovered)[-1].replayed > 0
    assert differences(expected, read_digest(job)) == []
    assert not job.memory.exists()


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize('mutation', ['schedule_not_restored', 'settings_of_groups_not_restored'])
def test_schedule_not_restored_changes_the_bits(
    mutation: str, loop: Callable[[], Cluster], expected: dict
) -> None:
    job = loop()
    broken = f'mutations.data_parallel_loop:{mutation}'
    assert -9 in job.run(fail_at='1:11:seal', mutation=SEALED)
    job.finish(mutation=broken)
    assert differences(expected, read_digest(job)) != []
