# SPDX-License-Identifier: Apache-2.0
"""Fills the model of one rank from the records of all owners: whole tensors from their shards."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron.moevement.state.resharded_tensors import canonical_name, is_of_an_expert
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.capture.layout import TensorSlice
from moevement_ext.memory.tensors import dtype_name
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.settings import Placed
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.reshard.index import NameOf, SlotIndex, Wanted

Read = Callable[[int, int], memoryview]
"""Bytes of a record, verified, from its owner and its index in the owner's header.

Raises `RefusedWindow`: no copy of it is undamaged."""


class DenseSlot(NamedTuple):
    """One dense slot of all owners, and the function that reads its records."""

    headers: Mapping[int, SlotHeader]
    """By owner; every header has its layout and place."""
    placed: Mapping[int, Placed]
    read: Read


@torch.no_grad()
def fill(slot: DenseSlot, training: TrainingState, shared: bool, group_step: int | None) -> None:
    """Fill parameters, optimizer state and buffers.

    `shared`: embedding and output layer share their weight. `group_step` is the step of an
    optimizer whose windows have no steps of parameters. Raises `RefusedWindow`, which names the
    tensor, if one is missing or damaged.
    """
    index = SlotIndex(names_of_shards(slot.placed, shared))
    for header in slot.headers.values():
        index.add(header)
    placed = next(iter(slot.placed.values()))

    def content(item: TensorSlice) -> torch.Tensor:
        name = whole_name(item.operator, item.tensor, shared)
        parameter = training.operators[item.operator].parameters.get(item.tensor)

        def shard(number: int, numel: int) -> torch.Tensor:
            return _read(slot.read, index, shard_name(name, number), item, numel)

        if parameter is None or parameter.numel() != item.source.numel():
            return shard(0, item.source.numel())  # a buffer, or one number for a parameter
        return merged(parameter, number_of_shards(item.operator, placed), shard, name)

    for operator in training.slices.values():
        for item in (*operator.full, *operator.always):
            if item.part == 'step' and group_step is not None:
                item.source.fill_(group_step)
            else:
                item.source.copy_(content(item))
    training.complete_restore(training.operators)


def _read(read: Read, index: SlotIndex, name: str, item: TensorSlice, numel: int) -> torch.Tensor:
    dtype = item.source.dtype
    nbytes = numel * item.source.element_size()
    need = Wanted(name, item.part, dtype_name(dtype), 0, numel, nbytes, item.volatile)
    data = bytearray(nbytes)
    for piece in index.pieces(need, int):
        size = piece.end - piece.begin
        record = read(piece.owner, piece.record)
        data[piece.at : piece.at + size] = record[piece.begin : piece.end]
    return torch.frombuffer(data, dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)


# Transformer Engine's layers have fused norms, and experts that are computed together.
_LAYERS_OF_A_CPU = (
    (
        re.compile(r'\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$'),
        r'.experts.local_experts.\3.\1.\2',
    ),
    (re.compile(r'\.self_attention\.linear_(?:qkv|q_proj)\.layer_norm_'), '.input_layernorm.'),
    (re.compile(r'\.mlp\.linear_fc1\.layer_norm_'), '.pre_mlp_layernorm.'),
)


def whole_name(operator: str, tensor: str, shared: bool) -> str:
    """Name in the whole model of a CPU, which is equal in all layouts.

    `operator` and `tensor` are as in a record, e.g. `layer3.expert5`; the first part of
    `tensor` names the model chunk. `shared`: embedding and output layer share their weight.
    """
    name = canonical_name(operator, tensor, shared)
    for pattern, local in _LAYERS_OF_A_CPU:
        name = pattern.sub(local, name)
    return name


def shard_name(name: str, shard: int) -> str:
    return f'{name} of tensor-parallel rank {shard}'


def names_of_shards(placed: Mapping[int, Placed], shared: bool) -> NameOf:
    """Names of the shards that owners hold, for the index of their records."""

    def name_of(operator: str, tensor: str, owner: int) -> str:
        seat = placed[owner].seat
        shard = seat.expert_tensor if is_of_an_expert(operator) else seat.tensor
        return shard_name(whole_name(operator, tensor, shared), shard)

    return name_of


def number_of_shards(operator: str, placed: Placed) -> int:
    """Number of ranks that may share a tensor of this operator."""
    layout = placed.layout
    return layout.expert_tensor if is_of_an_expert(operator) else layout.tensor


def merged(
    parameter: torch.Tensor, shards: int, shard: Callable[[int, int], torch.Tensor], name: str
) -> torch.Tensor:
    """A whole tensor, flat; upstream's attributes of `parameter` describe its division.

    `shard` returns the elements of one shard, flat, from its index and number of elements.
    Raises `RefusedWindow`, which contains `name`, if the tensor is divided differently.
    """
    if shards == 1 or not getattr(parameter, 'tensor_model_parallel', False):
        return shard(0, parameter.numel())
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    sizes = list(parameter.shape)
    sizes[dim], rest = divmod(sizes[dim], shards)
    if rest or sizes[dim] % stride:
        raise RefusedWindow(f'{name}: {list(parameter.shape)} is not divided among {shards} ranks')
    numel = parameter.numel() // shards
    return _joined([shard(index, numel).view(sizes) for index in range(shards)], dim, stride)


def _joined(shards: Sequence[torch.Tensor], dim: int, stride: int) -> torch.Tensor:
    """Join shards of `stride` pieces each, such as the two halves of a gated unit."""
    pieces = [torch.chunk(shard, stride, dim) for shard in shards]
    return torch.cat([piece[part] for part in range(stride) for piece in pieces], dim).view(-1)
