# SPDX-License-Identifier: Apache-2.0
"""SIGKILLs of single workers: only their stage replays, with the bits of a fault-free run.

Also repeated losses of stages while another stage replays, before its replay ends.
"""

import re
from collections.abc import Sequence

import pytest

from moevement_ext.events import NextTier, Recovered, RecoveryStarted, WindowPersisted
from tests.distributed.conftest import ON_BOTH_BACKENDS, Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import NCCL_LIKE, Cluster
from tests.distributed.harness.faults import PERSISTED, SEALED, SETTLED
from tests.distributed.harness.setups import BF16, PP_EP, UNTIED, setups
from tests.distributed.probes import cascading
from tests.distributed.test_whole_job_recovery import ITERATIONS
from tests.support.quick import with_quick

pytestmark = ON_BOTH_BACKENDS

PP4 = f'{BF16} --pipeline-model-parallel-size 4 {UNTIED}'
BASE = f'{BF16} {PP_EP} {UNTIED}'

# Flags; where a worker dies, with windows of 2. Campaigns of `tools.chaos` draw other layouts.
LAYOUTS = setups('localized')


def flags_of(setup: str) -> list[str]:
    return f'{setup} {ITERATIONS}'.split()


def victims(fail_at: str) -> dict[int, int]:
    """How often each rank dies."""
    found: dict[int, int] = {}
    for fault in fail_at.split(','):
        rank = int(fault.partition(':')[0])
        found[rank] = found.get(rank, 0) + 1
    return found


def check_localized(job: Cluster, expected: dict) -> None:
    """All bits are right, no survivor was started again, and no rank fell back to a lower tier."""
    assert differences(expected, read_digest(job)) == []
    for rank in range(job.ranks):
        assert job.events_of(NextTier, rank) == []
        assert all(event.scope == 'localized' for event in job.events_of(Recovered, rank))
    assert not job.memory.exists(), 'host memory is given back at a clean exit'


def check_both_ways(
    cluster: Make,
    flags: Sequence[str],
    expected: dict,
    stand_in: str,
    lost_at: tuple[str, str] = ('1:8:backward', '1:9:forward'),
) -> Cluster:
    """A lost stage, and then a lost job, get all bits; return the job of the lost stage."""
    local, whole = (cluster(*flags, '--sparse-ckpt-window', '3') for _ in lost_at)
    assert local.survive(fail_at=lost_at[0], mutation=stand_in) == {1: 1}
    check_localized(local, expected)
    assert -9 in whole.run(fail_at=lost_at[1], mutation=stand_in)
    whole.finish(mutation=stand_in)
    assert whole.events_of(Recovered)[0].replayed >= 2
    assert differences(expected, read_digest(whole)) == []
    return local


@pytest.mark.parametrize('name', with_quick(LAYOUTS))
def test_lost_stage_recovers_with_the_bits_of_a_fault_free_run(
    name: str, backend: str, cluster: Make, reference: Reference
) -> None:
    setup, fail_at = LAYOUTS[name]['flags'], LAYOUTS[name]['dies']
    if backend == NCCL_LIKE and name == 'interleaved-overlapped-warmup':
        pytest.skip('over NCCL a failure restarts the whole job: docs/compatibility.md')
    flags = flags_of(setup)
    job = cluster(*flags, '--sparse-ckpt-window', '2')
    assert job.survive(fail_at=fail_at) == victims(fail_at)
    check_localized(job, reference(*flags))


@pytest.mark.thorough
def test_state_held_by_a_peer_is_copied_not_replayed(cluster: Make, reference: Reference) -> None:
    """Also if the peer has taken the step in which a worker dies."""
    flags = flags_of(f'--bf16 --pipeline-model-parallel-size 2 {UNTIED}')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    steps = 'mutations.liveness:rank_1_steps_when_the_others_have'
    assert job.survive(fail_at='1:9:step', mutation=steps) == {1: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    (recovered,) = job.events_of(Recovered, rank=3)
    assert (recovered.copied, recovered.stages) == ([1], [])


@pytest.mark.thorough
def test_stage_recovers_after_its_node_loses_its_memory(
    cluster: Make, reference: Reference
) -> None:
    """The replicas of the last stage's windows have the losses, even if no norm is computed."""
    flags = flags_of(f'{BASE} --clip-grad 0')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    lost = '2:8:forward,3:8:forward'
    assert job.survive(fail_at=lost, wipe=[1]) == victims(lost)
    check_localized(job, reference(*flags))
    assert job.events_of(Recovered, rank=3)[0].iterations


def test_unaffected_stages_do_not_recompute(cluster: Make) -> None:
    """Forward passes are counted: the cut-off iteration is the only one that is run twice."""
    job = cluster(*flags_of(PP4), '--sparse-ckpt-window', '3', *SETTLED, nodes=4)
    job.survive(fail_at='1:9:forward', mutation=f'probes.training:count_forward_passes,{PERSISTED}')
    per_iteration = 4  # micro-batches
    logs = [job.directory / f'attempt0-rank{rank}.log' for rank in range(4)]
    counts = [
        [int(found) for found in re.findall(r'^forward passes: (\d+)$', log.read_text(), re.M)]
        for log in logs
    ]
    for rank in (0, 2, 3):
        assert 12 * per_iteration <= counts[rank][0] <= 13 * per_iteration
    [recovered] = job.events_of(Recovered, 1)
    assert (recovered.target, recovered.replayed) == (8, 2)
    assert counts[1] == [(recovered.replayed + 4) * per_iteration]


@pytest.mark.mutation
@pytest.mark.thorough
def test_waiting_for_windows_of_a_copied_rank_prevents_persistence(cluster: Make) -> None:
    flags = flags_of(f'--bf16 --pipeline-model-parallel-size 2 {UNTIED}')
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    waiting = 'mutations.protection:what_rank_1_lacks_after_a_copy_is_waited_for'
    assert job.survive(fail_at='1:6:forward', mutation=waiting) == {1: 1}
    assert [event.start for event in job.events_of(WindowPersisted)] == [0]


@pytest.mark.mutation
def test_wrong_bit_in_a_replay_is_reported(cluster: Make) -> None:
    job = cluster(*flags_of(BASE), '--sparse-ckpt-window', '3')
    wrong_bit = 'mutations.localized:one_bit_wrong_in_the_replay'
    job.survive(fail_at='3:8:backward', mutation=f'{wrong_bit},{SEALED}')
    (recovered,) = job.events_of(Recovered, rank=3)
    (wrong,) = set(re.findall(r'wrong bit in (\S+)', job.output(0)))
    assert recovered.differing, wrong
    assert re.search(r'differing: [1-9]', job.output(0))


@pytest.mark.thorough
def test_wrong_bit_after_the_newest_capture_shows_in_the_next_loss(cluster: Make) -> None:
    """The state after 6 is captured, that after 7 is not yet; its loss is recorded."""
    job = cluster(*flags_of(BASE), '--sparse-ckpt-window', '3')
    mutation = 'mutations.localized:one_bit_wrong_after_the_last_capture'
    job.survive(fail_at='3:7:after-step', mutation=mutation)
    (recovered,) = job.events_of(Recovered, rank=3)
    assert 'wrong bit in' in job.output(0)
    assert recovered.differing == ['loss from iteration 7']


MUTATIONS = setups('localized-mutations')


@pytest.mark.mutation
@pytest.mark.parametrize('mutation', with_quick(MUTATIONS, 'log_of_neighbour_changed'))
def test_omitting_a_step_of_localized_recovery_changes_the_bits(
    mutation: str, cluster: Make, reference: Reference
) -> None:
    flags = flags_of(MUTATIONS[mutation])
    job = cluster(*flags, '--sparse-ckpt-window', '3')
    job.survive(fail_at='1:8:backward', mutation=f'mutations.localized:{mutation}')
    assert job.events_of(Recovered, rank=3)
    assert differences(reference(*flags), read_digest(job)) != []


TWO_A_STAGE = (
    f'{BF16} --pipeline-model-parallel-size 3 --expert-model-parallel-size 2 --num-layers 6 '
    f'{UNTIED} --train-iters 17'
).split()


def went_on(job: Cluster, rank: int, target: int) -> list[int]:
    """Through how many failures, in each recovery that ended at that iteration."""
    events = [event for event in job.events_of(Recovered, rank) if event.target == target]
    return [event.went_on for event in events]


@pytest.mark.thorough
def test_replay_survives_failures_faster_than_its_length(
    cluster: Make, reference: Reference
) -> None:
    flags = flags_of(PP4)
    job = cluster(*flags, '--sparse-ckpt-window', '3', nodes=4)
    kills = len(cascading.WITHOUT_END)
    mutation = 'probes.cascading:the_last_stage_dies_again_and_again'
    assert job.survive(fail_at='0:8:forward', mutation=mutation) == {0: 1, 3: kills}
    check_localized(job, reference(*flags))
    assert went_on(job, 0, 7) == [kills]
    assert len(job.events_of(RecoveryStarted, 0)) == 1
    assert went_on(job, 3, 7) == [0]


@pytest.mark.thorough
def test_stage_of_several_ranks_continues_its_replay_together(
    cluster: Make, reference: Reference
) -> None:
    """Then one of two is lost while the other one waits for it, with whom it began."""
    job = cluster(*TWO_A_STAGE, '--sparse-ckpt-window', '3', ranks=6, nodes=3)
    lost = '0:8:forward,4:14:forward:1'
    mutation = 'probes.cascading:ranks_of_stages_of_two_die'
    assert job.survive(fail_at=lost, mutation=mutation) == {0: 1, 4: 3, 5: 1}
    check_localized(job, reference(*TWO_A_STAGE, ranks=6))
    for rank in (0, 1):
        # 3: the error of an operation that a failure has ended may come after the new round.
        assert went_on(job, rank, 7) in ([2], [3])
        assert len(job.events_of(RecoveryStarted, rank)) == 1
    for rank in (4, 5):
        assert went_on(job, rank, 13) == [0]
    # Its first process may have begun to replay before it was killed.
    started = job.events_of(RecoveryStarted, 5)
    assert len([event for event in started if event.pid == started[-1].pid]) == 3
