# SPDX-License-Identifier: Apache-2.0
"""Jobs with the optimizer, the experts and the gradient norm of Transformer Engine.

Stand-ins have its rules on the CPU (`tests/stand_ins`).
"""

import pytest

from moevement_ext.events import Recovered
from tests.distributed.conftest import ON_BOTH_BACKENDS, Make, Reference, differences, read_digest
from tests.distributed.test_localized_recovery import check_both_ways

pytestmark = [pytest.mark.thorough, ON_BOTH_BACKENDS]

PLAIN = """--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2
 --untie-embeddings-and-output-weights --train-iters 12""".split()
FLAGS = [*PLAIN, '--sparse-ckpt-window', '3']
IN_TURNS = """--expert-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
 --overlap-moe-expert-parallel-comm""".split()
VARIANTS = 'mutations.upstream_variants'
TRANSFORMER_ENGINE = f'{VARIANTS}:transformer_engine'
BEFORE_SECOND_WINDOW = '1:5:backward'
"""The window of iterations 0 to 2 is complete, that of 3 to 5 is not; rank 0 replays with it."""
AT_FULL_RATE = ('--lr-warmup-iters', '0')
"""From the first update on: one with a rate of 0 is the same whatever steps are counted."""


def test_whole_job_and_localized_recovery_match_a_fault_free_run(
    cluster: Make, reference: Reference
) -> None:
    expected = reference(*PLAIN, stand_in=TRANSFORMER_ENGINE)
    check_both_ways(cluster, PLAIN, expected, TRANSFORMER_ENGINE)


def test_survivor_resets_step_counts_for_a_replay_from_the_start(
    cluster: Make, reference: Reference
) -> None:
    expected = reference(*PLAIN, *AT_FULL_RATE, stand_in=TRANSFORMER_ENGINE)
    local = cluster(*FLAGS, *AT_FULL_RATE)
    assert local.survive(fail_at=BEFORE_SECOND_WINDOW, mutation=TRANSFORMER_ENGINE) == {1: 1}
    assert differences(expected, read_digest(local)) == []
    assert local.events_of(Recovered)[0].replayed == 4, 'from the start'


DRAWS = ('--te-rng-tracker', '--attention-dropout', '0.1')
GENERATORS = f'{VARIANTS}:generators_tracked'


def test_tracked_generators_are_restored_in_place(cluster: Make, reference: Reference) -> None:
    """With `--te-rng-tracker` states are no tensors."""
    expected = reference(*PLAIN, *DRAWS, stand_in=GENERATORS)
    check_both_ways(cluster, (*PLAIN, *DRAWS), expected, GENERATORS)


@pytest.mark.mutation
def test_generators_not_restored_change_the_bits(cluster: Make, reference: Reference) -> None:
    expected = reference(*PLAIN, *DRAWS, stand_in=GENERATORS)
    broken = cluster(*FLAGS, *DRAWS)
    broken.survive(fail_at='1:8:backward', mutation=f'{VARIANTS}:generators_not_restored')
    assert differences(expected, read_digest(broken)) != []


def test_first_expert_of_a_group_may_thaw_last(cluster: Make, reference: Reference) -> None:
    """The group asks it whether gradients are wanted."""
    expected = reference(*PLAIN, stand_in=TRANSFORMER_ENGINE)
    local = cluster(*FLAGS)
    variant = f'{VARIANTS}:experts_in_reverse'
    assert local.survive(fail_at='1:8:backward', mutation=variant) == {1: 1}
    assert differences(expected, read_digest(local)) == []


def test_delayed_weight_gradients_are_recovered(cluster: Make, reference: Reference) -> None:
    """Those of frozen experts are not: nothing was put aside for them."""
    in_turns = (*FLAGS, *IN_TURNS)
    expected = reference(*PLAIN, *IN_TURNS, stand_in=f'{VARIANTS}:delayed_gradients')
    local = cluster(*in_turns)
    assert local.survive(fail_at='1:8:forward', mutation=f'{VARIANTS}:delayed_gradients') == {1: 1}
    assert differences(expected, read_digest(local)) == []


@pytest.mark.mutation
def test_delayed_gradients_of_frozen_layers_raise(cluster: Make) -> None:
    broken = cluster(*FLAGS, *IN_TURNS)
    with pytest.raises((RuntimeError, TimeoutError)):
        broken.survive(
            fail_at='1:8:forward',
            mutation=f'{VARIANTS}:delayed_gradients_of_frozen_asked_for',
            timeout_s=60,
        )
    assert 'Pop empty queue' in broken.tail()


@pytest.mark.mutation
@pytest.mark.parametrize(
    ('mutation', 'fail_at', 'flags'),
    [
        ('steps_of_groups_not_taken_away', BEFORE_SECOND_WINDOW, AT_FULL_RATE),
        ('experts_frozen_one_by_one', '1:8:backward', ()),
    ],
)
def test_omitting_a_step_for_transformer_engine_changes_the_bits(
    cluster: Make, reference: Reference, mutation: str, fail_at: str, flags: tuple[str, ...]
) -> None:
    expected = reference(*PLAIN, *flags, stand_in=TRANSFORMER_ENGINE)
    broken = cluster(*FLAGS, *flags)
    assert broken.survive(fail_at=fail_at, mutation=f'{VARIANTS}:{mutation}') == {1: 1}
    assert broken.events_of(Recovered)[0].replayed >= 4
    assert differences(expected, read_digest(broken)) != []
