# SPDX-License-Identifier: Apache-2.0
"""Groups come out of the number of GPUs, and layouts that cannot be are refused by field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tools.model.layout import PRECISIONS, Layout, spread


@given(st.integers(1, 200), st.integers(1, 32))
def test_layers_are_distributed_equally_and_the_ends_have_fewest(layers, stages):
    counts = spread(layers, stages)
    assert len(counts) == stages and sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    if layers % stages < stages:
        assert counts[-1] == min(counts)
    if layers % stages < stages - 1:
        assert counts[0] == min(counts)


def test_layers_of_stages_cover_the_model():
    assert [Layout(4, pipeline=4).layers_of(stage, 6) for stage in range(4)] == [
        [[1]],
        [[2, 3]],
        [[4, 5]],
        [[6]],
    ]
    uneven = Layout(2, pipeline=2, layers_per_stage=(1, 3))
    assert uneven.layers_of(1, 4) == [[2, 3, 4]]
    assert Layout(2, pipeline=2, chunks=2).layers_of(1, 8) == [[3, 4], [7, 8]]


@pytest.mark.parametrize(
    ('name', 'with_own_weights', 'with_bf16_weights'),
    [
        ('bf16', (12, 2), (12, 2)),
        ('c1', (8, 2), (8, 2)),
        ('c2', (13, 1), (12, 2)),
        ('c3', (11, 1), (12, 2)),
        ('c4', (6, 1), (7, 2)),
        ('c5', (5, 1), (6, 2)),
    ],
)
def test_precisions_of_the_paper_have_these_bytes(name, with_own_weights, with_bf16_weights):
    own = PRECISIONS[name]
    assert (own.full_bytes, own.weight_bytes) == with_own_weights
    wider = replace(own, compute='bf16')
    assert (wider.full_bytes, wider.weight_bytes) == with_bf16_weights


@pytest.mark.parametrize(
    ('name', 'of_weights', 'of_state', 'always'),
    [
        ('bf16', 0, 0, 0),
        ('c1', 0, 12, 0),
        ('c2', 4, 0, 0),
        ('c3', 4, 4, 40),
        ('c4', 4, 12, 40),
        ('c5', 4, 12, 40),
    ],
)
def test_scales_have_these_bytes(name, of_weights, of_state, always):
    one = PRECISIONS[name]
    found = (one.weight_scale_bytes, one.state_scale_bytes, one.scaling_bytes)
    assert found == (of_weights, of_state, always)
