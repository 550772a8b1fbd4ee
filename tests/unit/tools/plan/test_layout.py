# SPDX-License-Identifier: Apache-2.0
"""Layers of stages, and bytes of precisions, by hand."""

import pytest
from msgspec.structs import replace

from tools.model.layout import PRECISIONS, Layout


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
    ('name', 'own', 'with_bf16_weights', 'scales'),
    [
        ('bf16', (12, 2), (12, 2), (0, 0, 0)),
        ('c1', (8, 2), (8, 2), (0, 12, 0)),
        ('c2', (13, 1), (12, 2), (4, 0, 0)),
        ('c3', (11, 1), (12, 2), (4, 4, 40)),
        ('c4', (6, 1), (7, 2), (4, 12, 40)),
        ('c5', (5, 1), (6, 2), (4, 12, 40)),
    ],
)
def test_precisions_of_the_paper_have_these_bytes(name, own, with_bf16_weights, scales):
    """In full and of weights; scales of weights, of states, and of every slot."""
    found = PRECISIONS[name]
    assert (found.full_bytes, found.weight_bytes) == own
    assert (found.weight_scale_bytes, found.state_scale_bytes, found.scaling_bytes) == scales
    wider = replace(found, compute='bf16')
    assert (wider.full_bytes, wider.weight_bytes) == with_bf16_weights
