# SPDX-License-Identifier: Apache-2.0
"""Counters, random number streams and parameter groups in another layout."""

import math
from typing import Any

import msgspec
import pytest

from megatron.moevement.state.global_scalars import GlobalScalars, Reduced
from megatron.moevement.state.iteration_state import IterationState, RngState, ScalerState
from megatron.moevement.state.resharded_state import Streams, resharded, streams_of
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Seat

EXPERTS = 'experts'


def random_numbers(mark: str) -> RngState:
    tracker = {EXPERTS: f'experts of {mark}'.encode(), 'model': f'model of {mark}'.encode()}
    numpy = ('MT19937', mark.encode(), 0, 0, 0.0)
    return RngState((3, (1,), None), numpy, mark.encode(), mark.encode(), tracker)


def state(mark: str, **changes: Any) -> IterationState:
    made = IterationState(
        iteration=8,
        consumed_train_samples=32,
        consumed_valid_samples=4,
        skipped_train_samples=0,
        floating_point_operations=1.0,
        scheduler_steps=32,
        scalars=GlobalScalars([3.0, 4.0], [False, True], 7),
        rng=random_numbers(mark),
        scalers=[],
        group_steps=[5, 5],
        groups=[
            {'wd_mult': 1.0, 'lr_mult': 1.0, 'is_expert_parallel': False, 'max_lr': 0.1},
            {'wd_mult': 1.0, 'lr_mult': 1.0, 'is_expert_parallel': True, 'max_lr': 0.2},
        ],
    )
    return msgspec.structs.replace(made, **changes)


NEW = state('new', iteration=0, consumed_train_samples=0, groups=[], group_steps=[])


def test_owners_at_different_samples_are_refused() -> None:
    states = {0: state('a'), 1: state('b', consumed_train_samples=36)}
    with pytest.raises(RefusedWindow, match='rank 1 is at iteration 8 and sample 36, rank 0'):
        resharded(states, Streams(0, 0), EXPERTS, NEW, Reduced())


def test_stream_without_an_owner_is_seeded() -> None:
    found = resharded({0: state('a')}, Streams(None, 0), EXPERTS, NEW, Reduced()).rng
    assert (found.torch, found.tracker[EXPERTS]) == (b'new', b'experts of a')
    found = resharded({0: state('a')}, Streams(0, None), EXPERTS, NEW, Reduced()).rng
    assert found.tracker == {EXPERTS: b'experts of new', 'model': b'model of a'}


SEATS = {
    0: Seat(data=0, expert=0),
    1: Seat(data=1, expert=1),
    2: Seat(pipeline=1, data=0, expert=0),
    3: Seat(pipeline=1, data=1, expert=1),
}


@pytest.mark.parametrize(
    ('own', 'streams'),
    [
        (Seat(data=1, expert=0, expert_data=1), Streams(1, 0)),
        (Seat(data=2, expert=1), Streams(0, 1)),
        (Seat(pipeline=1, data=0, expert=1), Streams(2, 3)),
        (Seat(pipeline=2, data=0), Streams(None, None)),
        (Seat(data=0, expert=2), Streams(0, None)),
    ],
)
def test_streams_belong_to_stages_and_to_shards_of_experts(own: Seat, streams: Streams) -> None:
    assert streams_of(own, SEATS, each_data_rank=False) == streams


def test_data_parallel_ranks_may_have_separate_streams() -> None:
    assert streams_of(Seat(data=2), SEATS, each_data_rank=True) == Streams(None, 0)


def test_groups_are_matched_by_their_distinguishing_settings() -> None:
    groups = [{'wd_mult': 1.0, 'lr_mult': 1.0, 'is_expert_parallel': True, 'max_lr': 9.0}]
    one = msgspec.structs.replace(NEW, groups=groups, group_steps=[None])
    found = resharded({0: state('a')}, Streams(0, 0), EXPERTS, one, Reduced())
    assert found.groups == [{**groups[0], 'max_lr': 0.2}]
    assert found.group_steps == [5]
    other = [{'wd_mult': 0.0, 'lr_mult': 1.0, 'is_expert_parallel': True, 'max_lr': 9.0}]
    one = msgspec.structs.replace(NEW, groups=other, group_steps=[None])
    found = resharded({0: state('a')}, Streams(0, 0), EXPERTS, one, Reduced())
    assert (found.groups, found.group_steps) == (other, [5])


@pytest.mark.parametrize('stale', [None, 3], ids=['never counted', 'of a dense checkpoint'])
def test_groups_that_are_empty_on_an_owner_take_the_common_step(stale: int | None) -> None:
    """Some versions of Adam count no steps of such a group."""
    states = {0: state('a', group_steps=[5, stale]), 3: state('b', group_steps=[5, 5])}
    one = state('new', group_steps=[None, None])
    assert resharded(states, Streams(0, 3), EXPERTS, one, Reduced()).group_steps == [5, 5]


def test_total_norm_is_kept_with_another_number_of_optimizers() -> None:
    three = resharded({0: state('a')}, Streams(0, 0), EXPERTS, NEW, Reduced(3, 3)).scalars
    assert three == GlobalScalars([5.0, 0.0, 0.0], [True] * 3, 7)
    assert math.hypot(*three.grad_norms) == 5.0
    two = resharded({0: state('a')}, Streams(0, 0), EXPERTS, NEW, Reduced(2, 2)).scalars
    assert two.grad_norms == [3.0, 4.0]


def test_optimizers_of_the_same_ranks_take_the_total_norm() -> None:
    """As of a sharded optimizer after a plain one, of which experts had a separate norm."""
    found = resharded({0: state('a')}, Streams(0, 0), EXPERTS, NEW, Reduced(2, 1)).scalars
    assert found == GlobalScalars([5.0], [True, True], 7)


def test_separate_norm_of_detached_heads_is_kept() -> None:
    one = state('a', scalars=GlobalScalars([3.0, 4.0, 6.0, 8.0], [False, False], 7))
    found = resharded({0: one}, Streams(0, 0), EXPERTS, NEW, Reduced(2, 1, 2)).scalars
    assert found.grad_norms == [5.0, 10.0]
    found = resharded({0: one}, Streams(0, 0), EXPERTS, NEW, Reduced(2, 2, 2)).scalars
    assert found.grad_norms == [3.0, 4.0, 6.0, 8.0]
    one = state('a', scalars=GlobalScalars([3.0], [], 7))
    with pytest.raises(RefusedWindow, match='1 gradient norms of 2 sets'):
        resharded({0: one}, Streams(0, 0), EXPERTS, NEW, Reduced(1, 1, 2))


def with_rates(*rates: float) -> dict[str, Any]:
    """Fields of a state with two groups of one kind that differ in their rates, if any."""
    groups = [{'wd_mult': 1.0, 'max_lr': rate, 'weight_decay': rate / 10} for rate in rates]
    return {'groups': groups, 'group_steps': [5] * len(rates)}


def test_groups_that_differ_in_rates_only_are_told_apart_by_them() -> None:
    one = msgspec.structs.replace(NEW, **with_rates(0.3, 0.1, 0.2))
    found = resharded(
        {0: state('a', **with_rates(0.1, 0.2, 0.3))}, Streams(0, 0), EXPERTS, one, Reduced()
    )
    assert found.groups == one.groups


def test_groups_that_cannot_be_told_apart_are_refused() -> None:
    one = msgspec.structs.replace(NEW, **with_rates(0.5))
    with pytest.raises(RefusedWindow, match='cannot be told apart'):
        resharded({0: state('a', **with_rates(0.1, 0.2))}, Streams(0, 0), EXPERTS, one, Reduced())
    found = resharded({0: state('a', **with_rates(0.1))}, Streams(0, 0), EXPERTS, one, Reduced())
    assert found.groups == with_rates(0.1)['groups'], 'rates of a dense checkpoint'


def test_weight_decay_that_a_state_lacks_is_computed() -> None:
    one = msgspec.structs.replace(NEW, **with_rates(0.1))
    lacking = state('a', groups=[{'wd_mult': 1.0, 'max_lr': 0.1}], group_steps=[5])
    found = resharded({0: lacking}, Streams(0, 0), EXPERTS, one, Reduced())
    assert found.groups == lacking.groups


def test_loss_scales_must_agree() -> None:
    scalers = [ScalerState(2.0, 0, 0), ScalerState(2.0, 0, 0)]
    one = msgspec.structs.replace(NEW, scalers=scalers[:1])
    found = resharded({0: state('a', scalers=scalers)}, Streams(0, 0), EXPERTS, one, Reduced())
    assert found.scalers == scalers[:1]
    scalers = [ScalerState(2.0, 0, 0), ScalerState(4.0, 0, 0)]
    with pytest.raises(RefusedWindow, match=r'loss scales \[2.0, 4.0\]'):
        resharded({0: state('a', scalers=scalers)}, Streams(0, 0), EXPERTS, one, Reduced())
