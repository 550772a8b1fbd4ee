# SPDX-License-Identifier: Apache-2.0
"""Fills the model of one rank from the records of all owners."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from megatron.moevement.offline.whole import (
    merged,
    names_of_shards,
    number_of_shards,
    shard_name,
    whole_name,
)
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.capture.layout import TensorSlice
from moevement_ext.memory.dtypes import dtype_name
from moevement_ext.memory.window.placed import Placed
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.reshard.index import SlotIndex, Wanted

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
