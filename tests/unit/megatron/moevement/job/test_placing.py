# SPDX-License-Identifier: Apache-2.0
"""Seats are those that upstream assigns; which layouts cannot continue from another one."""

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron.moevement.job.placing import layout_of, refuse, seat_of
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Layout

AXES = {'tp': 'tensor', 'cp': 'context', 'dp': 'data', 'pp': 'pipeline'}
EXPERT_AXES = {'tp': 'expert_tensor', 'ep': 'expert', 'dp': 'expert_data', 'pp': 'pipeline'}


@pytest.mark.parametrize('before', [False, True])
@pytest.mark.parametrize(
    ('tp', 'cp', 'pp', 'dp', 'ep', 'etp'),
    [
        (1, 1, 2, 2, 2, 1),
        (2, 1, 2, 2, 2, 1),
        (2, 2, 1, 4, 4, 2),
        (1, 1, 1, 4, 4, 1),
        (2, 1, 3, 2, 1, 2),
    ],
)
def test_seats_equal_those_of_upstream(
    tp: int, cp: int, pp: int, dp: int, ep: int, etp: int, before: bool
) -> None:
    ranks = tp * cp * pp * dp
    sizes = {'tensor': tp, 'context': cp, 'pipeline': pp, 'expert': ep, 'expert_tensor': etp}
    names = {'world_size': ranks} | {
        f'{name}_{"" if name in ("context", "expert_tensor") else "model_"}parallel_size': size
        for name, size in sizes.items()
    }
    layout = layout_of(names)
    assert layout is not None and layout.data == dp
    order = 'tp-cp-ep-pp-dp' if before else 'tp-cp-ep-dp-pp'
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    copies = ranks // (etp * ep * pp)
    if before and pp > 1 and copies != dp:
        return  # upstream refuses it
    experts = RankGenerator(tp=etp, ep=ep, dp=copies, pp=pp, cp=1, order=order)
    for generator, axes in ((dense, AXES), (experts, EXPERT_AXES)):
        for axis, field in axes.items():
            for group in generator.get_ranks(axis):
                seats = [seat_of(rank, layout, before) for rank in group]
                assert [getattr(seat, field) for seat in seats] == list(range(len(group)))


@pytest.mark.parametrize(
    ('name', 'shards', 'known'),
    [
        ('gtp_weight_remat_size', 2, False),
        ('expert_gtp_weight_remat_size', 2, False),
        ('tensor_parallel_num_weight_shards', 4, False),
        ('tensor_parallel_num_weight_shards', 2, True),
        ('expert_tensor_parallel_num_weight_shards', 2, False),
        ('expert_tensor_parallel_num_weight_shards', 1, True),
    ],
)
def test_layout_with_weight_shards_is_unknown(name: str, shards: int, known: bool) -> None:
    """By default, upstream has one shard per tensor-parallel rank; a flag raises the number."""
    sizes = {'tensor_model_parallel_size': 2, 'expert_tensor_parallel_size': 1}
    assert (layout_of({'world_size': 4, **sizes, name: shards}) is not None) == known


def test_layout_string_lists_its_sizes() -> None:
    sizes = {'world_size': 4, 'pipeline_model_parallel_size': 2, 'expert_model_parallel_size': 2}
    layout = layout_of({**sizes, 'use_distributed_optimizer': True})
    assert str(layout) == '4 ranks (PP 2, DP 2, EP 2, sharded optimizer)'


def test_other_data_parallel_size_with_sharded_data_is_refused() -> None:
    refuse(Layout(8, pipeline=2, data=4), Layout(4, data=4), interleaved=False, own_data=True)
    refuse(Layout(4, data=4), Layout(3, data=3), interleaved=False, own_data=False)
    with pytest.raises(RefusedWindow, match='start with 4 data-parallel ranks, not 3'):
        refuse(Layout(4, data=4), Layout(3, data=3), interleaved=False, own_data=True)


def test_other_tensor_parallel_size_is_refused() -> None:
    with pytest.raises(RefusedWindow, match='start with --tensor-model-parallel-size 2, or export'):
        refuse(Layout(4, tensor=2), Layout(4, tensor=4), interleaved=False, own_data=False)
    refuse(Layout(4, expert_tensor=2), Layout(4), interleaved=False, own_data=False)
    with pytest.raises(RefusedWindow, match='start with --expert-tensor-parallel-size 2'):
        refuse(Layout(4, expert_tensor=2), Layout(4), interleaved=True, own_data=False)
