# SPDX-License-Identifier: Apache-2.0
"""A tensor has the same name for every rank, chunk or expert shard that captures it."""

import pytest

from megatron.moevement.state.resharded_tensors import canonical_name

EXPERT = 'decoder.layers.2.mlp.experts'


@pytest.mark.parametrize(
    ('operator', 'tensor', 'name'),
    [
        ('layer3.rest', 'chunk1.decoder.layers.0.self_attention.linear_qkv.weight',
         'decoder.layers.2.self_attention.linear_qkv.weight'),
        ('layer3.router', 'chunk0.decoder.layers.1.mlp.router.expert_bias',
         'decoder.layers.2.mlp.router.expert_bias'),
        ('layer3.expert5', 'chunk0.decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight',
         f'{EXPERT}.local_experts.5.linear_fc1.weight'),
        ('layer3.expert5', 'chunk0.decoder.layers.0.mlp.experts.linear_fc2.weight1',
         f'{EXPERT}.linear_fc2.weight5'),
        ('layer3.rest', 'chunk0.decoder.layers.0.mlp.shared_experts.linear_fc1.weight',
         'decoder.layers.2.mlp.shared_experts.linear_fc1.weight'),
        ('mtp2.expert0', 'chunk1.mtp.layers.1.transformer_layer.mlp.experts.local_experts.0.'
         'linear_fc1.weight',
         'mtp.layers.1.transformer_layer.mlp.experts.local_experts.0.linear_fc1.weight'),
        ('others', 'chunk0.mtp.layers.0.enorm.weight', 'mtp.layers.0.enorm.weight'),
        ('head', 'chunk1.decoder.final_layernorm.weight', 'decoder.final_layernorm.weight'),
        ('head', 'chunk1.output_layer.weight', 'output_layer.weight'),
    ],
)  # fmt: skip
def test_canonical_name_has_numbers_of_the_whole_model(
    operator: str, tensor: str, name: str
) -> None:
    assert canonical_name(operator, tensor, shared=False) == name


def test_shared_output_layer_is_named_as_the_embedding() -> None:
    names = {
        canonical_name('head', 'chunk1.output_layer.weight', shared=True),
        canonical_name('embedding', 'chunk0.embedding.word_embeddings.weight', shared=True),
    }
    assert names == {'embedding.word_embeddings.weight'}
