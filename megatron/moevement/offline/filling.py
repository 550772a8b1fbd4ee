# SPDX-License-Identifier: Apache-2.0
"""Fills the model of one rank from the records of all owners."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from megatron.moevement.offline.whole import (
    merged,
    names_of_shards,
    number_of_shards,
    shard_name,
    whole_name,
)
from megatron.moevement.state.optimizer_state import complete_restore
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.capture.layout import TensorSlice
from moevement_ext.memory.dtypes import dtype_name
from moevement_ext.memory.window.placed import Placed
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.relayout.index import SlotIndex, Wanted

Read = Callable[[int, int], memoryview]
"""Bytes of a record, verified, from its owner and its index in the owner's header.

Raises `RefusedWindow`: no copy of it is undamaged."""


class DenseSlot(NamedTuple):
    """One dense slot of all owners, and the function that reads its records."""

    headers: Mapping[int, SlotHeader]
    """By owner; every header has its layout and place."""
    placed: Mapping[int, Placed]
    read: Read


class Filling:
    """Copies one slot into a model. One thread.

    `shared`: embedding and output layer share their weight.
    """

    def __init__(self, slot: DenseSlot, training: TrainingState, shared: bool) -> None:
        self._slot = slot
        self._training = training
        self._shared = shared
        self._placed = next(iter(slot.placed.values()))
        self._index = SlotIndex(names_of_shards(slot.placed, shared))
        for header in slot.headers.values():
            self._index.add(header)

    @torch.no_grad()
    def fill(self, group_step: int | None) -> None:
        """Fill parameters, optimizer state and buffers.

        `group_step` is the step of an optimizer whose windows have no steps of parameters.
        Raises `RefusedWindow`, which names the tensor, if one is missing or damaged.
        """
        for item in self._slices():
            if item.part == 'step' and group_step is not None:
                item.source.fill_(group_step)
                continue
            self._training.loader.restore(item.record(), self._content(item))
        complete_restore(
            list(self._training.states.values()),
            self._training.model,
            frozen=frozenset(),
            distributed=self._training.model[0].ddp_config.use_distributed_optimizer,
        )

    def _slices(self) -> Iterator[TensorSlice]:
        for operator in self._training.slices.values():
            yield from operator.full
            yield from operator.always

    def _content(self, item: TensorSlice) -> torch.Tensor:
        name = whole_name(item.operator, item.tensor, self._shared)
        parameter = self._training.operators[item.operator].parameters.get(item.tensor)

        def shard(index: int, numel: int) -> torch.Tensor:
            return self._read(shard_name(name, index), item, numel)

        if parameter is None or parameter.numel() != item.source.numel():
            return shard(0, item.source.numel())  # a buffer, or one number for a parameter
        return merged(parameter, number_of_shards(item.operator, self._placed), shard, name)

    def _read(self, name: str, item: TensorSlice, numel: int) -> torch.Tensor:
        dtype = item.source.dtype
        nbytes = numel * item.source.element_size()
        need = Wanted(name, item.part, dtype_name(dtype), 0, numel, nbytes, item.volatile)
        data = bytearray(nbytes)
        for piece in self._index.pieces(need, int):
            size = piece.end - piece.begin
            record = self._slot.read(piece.owner, piece.record)
            data[piece.at : piece.at + size] = record[piece.begin : piece.end]
        return torch.frombuffer(data, dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)
