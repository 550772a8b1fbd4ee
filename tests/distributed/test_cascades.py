# SPDX-License-Identifier: Apache-2.0
"""Repeated losses of stages while another stage replays, before its replay ends."""

import pytest

from moevement_ext.events import Recovered, RecoveryStarted
from tests.distributed.conftest import ON_BOTH_BACKENDS, Make, Reference
from tests.distributed.harness.cluster import Cluster
from tests.distributed.probes import cascading
from tests.distributed.test_localized_recovery import BF16, PP4, UNTIED, check_localized, flags_of

pytestmark = [ON_BOTH_BACKENDS, pytest.mark.thorough]

TWO_A_STAGE = (
    f'{BF16} --pipeline-model-parallel-size 3 --expert-model-parallel-size 2 --num-layers 6 '
    f'{UNTIED} --train-iters 17'
).split()


def went_on(job: Cluster, rank: int, target: int) -> list[int]:
    """Through how many failures, in each recovery that ended at that iteration."""
    events = [event for event in job.events_of(Recovered, rank) if event.target == target]
    return [event.went_on for event in events]


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
