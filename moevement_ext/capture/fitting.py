# SPDX-License-Identifier: Apache-2.0
"""Compares the records of a slot with the slices of a model."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.memory.dtypes import dtype_name
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import Record, SlotContext, SlotHeader, decode_context


class RangeKey(NamedTuple):
    """Identity of a captured range, for comparison of slots and models."""

    operator: str
    tensor: str
    part: str
    dtype: str
    start: int
    end: int

    @classmethod
    def of_record(cls, item: Record) -> Self:
        return cls(item.operator, item.tensor, item.part, item.dtype, item.start, item.end)

    @classmethod
    def of_slice(cls, item: TensorSlice) -> Self:
        dtype = dtype_name(item.source.dtype)
        return cls(item.operator, item.tensor, item.part, dtype, item.start, item.end)

    def __str__(self) -> str:
        return f'{self.tensor} ({self.part}, {self.dtype}, elements {self.start} to {self.end})'


def check_fits(header: SlotHeader, slices: Mapping[str, OperatorSlices]) -> None:
    """Check that a slot has all records that `slices` of this rank need, and no others.

    Raises `RefusedWindow` if the slot belongs to another model; the message names a parameter.
    """
    context = decode_context(header.context)
    needed = {RangeKey.of_slice(item) for item in _slices_of(context, slices)}
    held = {RangeKey.of_record(item) for item in header.records}
    where = f'slot {header.slot} of window {header.start}'
    for part in sorted(needed - held):
        raise RefusedWindow(f'{where} has no {part} of {part.operator}, which the model needs')
    for part in sorted(held - needed):
        raise RefusedWindow(f'{where} has {part} of {part.operator}, which the model does not have')
    absent = slices.keys() - {*context.full, *context.weights}
    if header.slot == 0 and absent:
        raise RefusedWindow(f'{where} has no record of {min(absent)}, which the model has')


def _slices_of(context: SlotContext, slices: Mapping[str, OperatorSlices]) -> Iterator[TensorSlice]:
    for name in slices.keys() & context.full:
        yield from slices[name].full
    for name in slices.keys() & context.weights:
        yield from slices[name].weights
    for operator in slices.values():
        yield from operator.always
