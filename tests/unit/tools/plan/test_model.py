# SPDX-License-Identifier: Apache-2.0
"""Parameters, layers and bytes of models, as published and by hand; every rank has its share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tools.model.description import KNOWN, PRESETS
from tools.model.layout import PRECISIONS, Layout, Precision
from tools.model.shape import LatentAttention, ModelShape
from tools.model.sizes import operator_sizes, shard

TINY = ModelShape(
    'tiny', layers=2, hidden_size=8, attention_heads=2, vocab_size=100, ffn_hidden_size=16,
    experts=4, top_k=2, expert_hidden_size=5, shared_hidden_size=3, moe_layers=(0, 1),
)  # fmt: skip


@pytest.mark.parametrize('name', PRESETS)
def test_preset_has_its_published_size(name):
    model, published = PRESETS[name].model, KNOWN.models[name]['published']
    assert model.total_parameters / 1e9 == pytest.approx(published['total'], rel=0.02)
    if 'active' in published:
        assert model.active_parameters / 1e9 == pytest.approx(published['active'], rel=0.035)


def test_parts_add_up_by_hand():
    attention, norms = 4 * 8 * 8, 2 * 8
    expert, shared, dense = 3 * 8 * 5, 3 * 8 * 3, 3 * 8 * 16
    ends = 2 * 100 * 8 + 8
    layers = 2 * (attention + norms) + dense + 8 * 4 + 4 * expert + shared
    assert TINY.total_parameters == ends + layers
    assert TINY.active_parameters == ends + layers - 2 * expert


def test_biases_positions_and_norms_count():
    changed = replace(TINY, norm_bias=True, learned_positions=7, qk_norm=True, qkv_bias=True)
    added = 5 * 8 + 7 * 8 + 2 * 2 * 4 + 2 * 24
    assert changed.total_parameters - TINY.total_parameters == added
    ungated = replace(TINY, gated=False, linear_bias=True)
    biases = 2 * (24 + 8) + (16 + 8) + 4 * (5 + 8) + (3 + 8)
    matrices = 8 * (16 + 4 * 5 + 3)
    assert ungated.total_parameters - TINY.total_parameters == biases - matrices


def test_latent_attention_has_the_parameters_of_a_hand_calculation():
    latent = LatentAttention(
        kv_rank=6, query_key_size=4, position_size=2, value_size=3, query_rank=5
    )
    changed = replace(TINY, latent=latent)
    keys = 8 * (6 + 2) + 6 + 6 * 2 * (4 + 3)
    queries = 8 * 5 + 5 + 5 * 2 * (4 + 2)
    added = 2 * (keys + queries + 2 * 3 * 8 - 4 * 8 * 8)
    assert changed.total_parameters - TINY.total_parameters == added


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


MODEL = ModelShape(
    'tiny', layers=4, hidden_size=64, attention_heads=4, vocab_size=256, ffn_hidden_size=128,
    experts=8, top_k=2, expert_hidden_size=32, moe_layers=(0, 1, 1, 1),
)  # fmt: skip

LAYOUTS = [
    Layout(1),
    Layout(8, pipeline=2, expert=4),
    Layout(8, pipeline=2, expert=2, overlap_grad_reduce=True),
    Layout(16, pipeline=2, expert=4, context=2, chunks=2),
    Layout(8, pipeline=4, expert=2),
]


def total_bytes(layout, attribute, model=MODEL):
    return sum(
        getattr(operator_sizes(model, layout, Precision(), stage), attribute).sum()
        for stage in range(layout.pipeline)
    )


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.integers(1, 7),
    st.one_of(st.none(), st.integers(1, 100)),
)
def test_shards_partition_every_piece(elements, shards, bucket):
    owned = shard(elements, shards, bucket)
    assert owned.sum(axis=1).tolist() == elements
    assert (owned >= 0).all()
    if bucket is None:
        assert owned.sum(axis=0).max() == -(-sum(elements) // shards)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_all_ranks_together_hold_the_model_once(layout):
    assert total_bytes(layout, 'full') == 12 * MODEL.total_parameters
    assert total_bytes(layout, 'weights') == 2 * MODEL.total_parameters


def test_without_the_distributed_optimizer_every_replica_holds_all():
    layout = Layout(8, pipeline=2, expert=2, distributed_optimizer=False)
    experts = 3 * 8 * 3 * 64 * 32
    others = MODEL.total_parameters - experts
    assert total_bytes(layout, 'full') == 12 * (4 * others + 2 * experts)


def test_tensor_parallel_ranks_repeat_norms_and_routers():
    layout = Layout(4, tensor=2, expert_tensor=1, expert=2)
    repeated = MODEL.norm.total * 9 + 3 * MODEL.router().total
    assert total_bytes(layout, 'full') == 12 * (MODEL.total_parameters + repeated)


def test_a_tied_embedding_of_several_stages_is_sharded_by_itself():
    """Upstream gives it a bucket of its own, whether buckets are used or not."""
    tied = replace(MODEL, tied_embeddings=True, learned_positions=32)
    layout = Layout(8, pipeline=2)
    first = operator_sizes(tied, layout, Precision(), 0)
    assert first.names[0] == 'embedding'
    # The positions lie with the layers, in backward order behind all of them.
    assert (first.full[0] // 12).tolist() == [4096, 4096, 4096, 4096 + 2048]
    last = operator_sizes(tied, layout, Precision(), 1)
    assert last.names[0] == 'head'
    assert (last.full[0] // 12).tolist() == [4096 + 64, 4096, 4096, 4096]
    whole = operator_sizes(tied, Layout(4), Precision(), 0)
    assert whole.full[0, 0] == 0, 'one stage: nothing is shared between ranks'


def test_an_expert_is_on_the_ranks_that_compute_with_it():
    operators = operator_sizes(MODEL, Layout(4, expert=2), Precision(), 0)
    holders = {
        name: np.flatnonzero(operators.full[operators.names.index(name)]).tolist()
        for name in ('layer2.expert0', 'layer2.expert7')
    }
    # Backward order: the last of the 12 local experts of each layer come first.
    assert holders == {'layer2.expert0': [2], 'layer2.expert7': [3]}


def test_order_is_that_of_the_training():
    tied = replace(MODEL, tied_embeddings=True)
    names = operator_sizes(tied, Layout(2, expert=2), Precision(), 0).names
    first = 'embedding head layer2.expert0 layer2.expert4 layer2.expert1 layer2.expert5'
    assert names[:6] == first.split()
    last = 'layer1.rest layer2.rest layer2.router layer3.rest layer3.router layer4.rest'
    assert names[26:] == [*last.split(), 'layer4.router']


def test_scales_are_counted_for_each_tensor_that_has_them():
    """Two matrices of an expert, whose weights, masters and both moments are scaled; a gate."""
    found = operator_sizes(MODEL, Layout(1), PRECISIONS['c4'], 0)
    expert, router = map(found.names.index, ('layer2.expert0', 'layer2.router'))
    elements, gate = 3 * MODEL.hidden_size * MODEL.expert_hidden_size, MODEL.hidden_size * 8
    assert found.full[expert] == 6 * elements + 2 * 4 * (1 + 3)
    assert found.weights[expert] == elements + 2 * 4
    assert (found.full[router], found.weights[router]) == (6 * gate + 4 * 3, gate)
