# SPDX-License-Identifier: Apache-2.0
"""Tensors in another layout: names in the whole model, and ranges of the shards of experts."""

import pytest
import torch

from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.resharded_tensors import ExpertDivision, canonical_name
from moevement_ext.memory.window.refusal import RefusedWindow

HIDDEN, UNITS, SHARDS = 3, 8, 4
FC1 = 'chunk0.decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.'
FC2 = 'chunk0.decoder.layers.0.mlp.experts.linear_fc2.'


def whole(name: str, halves: int) -> torch.Tensor:
    """The numbered elements of a tensor of an expert."""
    shapes = {
        f'{FC1}weight': [halves * UNITS, HIDDEN],
        f'{FC1}bias': [halves * UNITS],
        f'{FC2}weight0': [HIDDEN, UNITS],
        f'{FC2}bias0': [HIDDEN],
    }
    shape = shapes[name]
    return torch.arange(torch.Size(shape).numel()).view(shape)


NAMES = [f'{FC1}weight', f'{FC1}bias', f'{FC2}weight0', f'{FC2}bias0']


def shard_of(name: str, halves: int, shards: int, shard: int) -> torch.Tensor:
    """The shard of a rank, as upstream divides the tensor."""
    tensor = whole(name, halves)
    if name.startswith(FC1):
        return torch.cat([half.chunk(shards)[shard] for half in tensor.chunk(halves)])
    return tensor if tensor.dim() == 1 else tensor.chunk(shards, dim=1)[shard]


def division(halves: int) -> ExpertDivision:
    """Division of a rank that is one of four shards."""
    parameters = {
        name: torch.nn.Parameter(shard_of(name, halves, SHARDS, 0).float()) for name in NAMES
    }
    operators = {'layer1.expert0': Operator('layer1.expert0', 'expert', parameters)}
    return ExpertDivision(operators, SHARDS, gated=halves == 2)


@pytest.mark.parametrize('halves', [1, 2], ids=['plain', 'gated'])
@pytest.mark.parametrize('shards', [1, 2, 4, 8])
@pytest.mark.parametrize('name', NAMES)
def test_ranges_of_a_shard_match_upstreams_division(name: str, shards: int, halves: int) -> None:
    """Also for other numbers of shards, and from any element on."""
    for shard in range(shards):
        elements = shard_of(name, halves, shards, shard).flatten().tolist()
        found = division(halves).of('layer1.expert0', 'exp_avg', name, shards, shard)
        for start in range(len(elements)):
            ranges = found.ranges(start, len(elements))
            assert [at for begin, end in ranges for at in range(begin, end)] == elements[start:]


def test_scalar_state_is_not_divided() -> None:
    found = division(2).of('layer1.expert0', 'step', f'{FC1}weight', 2, 1)
    assert [*found.ranges(0, 1)] == [(0, 1)]


def test_tensor_of_another_rank_stays_undivided() -> None:
    """No rank asks for it: another layer, a router."""
    for operator in ('layer2.expert0', 'layer1.router'):
        found = division(1).of(operator, 'master', f'{FC1}weight', 2, 1)
        assert [*found.ranges(3, 9)] == [(3, 9)]


@pytest.mark.parametrize('part', ['scale_exp_avg', 'weight_scale', 'scaling'])
def test_scale_of_a_shard_is_refused(part: str) -> None:
    with pytest.raises(RefusedWindow, match='start with the --expert-tensor-parallel-size of'):
        division(1).of('layer1.expert0', part, f'{FC1}weight', 2, 1)


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
