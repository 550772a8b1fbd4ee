# SPDX-License-Identifier: Apache-2.0
"""Parameters are counted as published, and descriptions that cannot be are refused by field."""

import pytest
from msgspec.structs import replace

from tools.model.description import KNOWN, PRESETS
from tools.model.shape import LatentAttention, ModelShape

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
