# SPDX-License-Identifier: Apache-2.0
"""Shards of a tensor are merged into the tensor that upstream has divided."""

import pytest
import torch
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu

from megatron.moevement.offline.filling import merged, names_of_shards, whole_name
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Layout, Placed, Seat

EXPERTS = 'decoder.layers.2.mlp.experts.local_experts'


@pytest.mark.parametrize(
    ('operator', 'tensor', 'name'),
    [
        ('layer3.expert5', 'chunk0.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight',
         f'{EXPERTS}.5.linear_fc1.weight'),
        ('layer3.expert5', 'chunk0.decoder.layers.0.mlp.experts.linear_fc2.weight1',
         f'{EXPERTS}.5.linear_fc2.weight'),
        ('layer3.rest', 'chunk1.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight',
         'decoder.layers.2.input_layernorm.weight'),
        ('layer3.rest', 'chunk1.decoder.layers.0.mlp.linear_fc1.layer_norm_bias',
         'decoder.layers.2.pre_mlp_layernorm.bias'),
        ('layer3.rest', 'chunk1.decoder.layers.0.mlp.linear_fc1.weight',
         'decoder.layers.2.mlp.linear_fc1.weight'),
    ],
)  # fmt: skip
def test_whole_name_is_that_of_the_local_layers(operator: str, tensor: str, name: str) -> None:
    assert whole_name(operator, tensor, shared=False) == name


def test_shard_of_an_expert_is_numbered_in_its_own_group() -> None:
    placed = Placed(
        'training', Layout(4, tensor=4, expert_tensor=2), Seat(tensor=3, expert_tensor=1)
    )
    name_of = names_of_shards({7: placed}, shared=False)
    weight = 'chunk0.decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight'
    assert name_of('layer1.expert0', weight, 7).endswith('rank 1')
    assert name_of('layer1.router', 'chunk0.decoder.layers.0.mlp.router.weight', 7).endswith(
        'rank 3'
    )


@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('dim', [0, 1])
@pytest.mark.parametrize('shards', [1, 2, 4])
def test_upstream_shards_are_merged(shards: int, dim: int, stride: int) -> None:
    shape = [16, 24]
    sizes = [size // shards if at == dim else size for at, size in enumerate(shape)]
    parts = []
    for rank in range(shards):
        part = torch.empty(sizes)
        torch.manual_seed(5)  # upstream draws the whole tensor on each rank
        whole = _initialize_affine_weight_cpu(
            part,
            *shape,
            sizes[dim],
            dim,
            torch.nn.init.normal_,
            stride,
            return_master_weight=True,
            rank=rank,
            world_size=shards,
        )
        parts.append(part)
    found = merged(divided(shape, dim, stride), shards, lambda index, _: parts[index].view(-1), 'x')
    assert torch.equal(found.view(shape), whole)


def divided(shape: list[int], dim: int, stride: int) -> torch.Tensor:
    """A parameter that upstream divides among tensor-parallel ranks."""
    parameter = torch.empty(shape)
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dim, stride
    return parameter


def test_undivided_tensor_is_read_once() -> None:
    asked = []

    def shard(index: int, numel: int) -> torch.Tensor:
        asked.append((index, numel))
        return torch.zeros(numel)

    merged(torch.empty(3, 5), 4, shard, 'x')
    assert asked == [(0, 15)]


def test_impossible_division_is_refused() -> None:
    with pytest.raises(RefusedWindow, match='output_layer.*not divided among 3'):
        merged(divided([16, 24], 0, 1), 3, lambda *_: torch.empty(0), 'output_layer')
