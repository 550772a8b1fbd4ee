# SPDX-License-Identifier: Apache-2.0
"""Where each captured tensor goes inside a slot; computed once per plan, not per iteration."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moevement_ext.memory.batches import in_batches
from moevement_ext.memory.dtypes import dtype_name
from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.window.slot import Record, align_up
from moevement_ext.plan.byte_planner import OperatorTable, WindowPlan

PIECE_BYTES = 32 * 2**20
"""Copies queued at once; what else is to be copied from the device waits behind two pieces."""
# Three files; where a slot begins in one depends on how early those before it were sealed.
_PLACES_KEPT = 6


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A flat, contiguous part of the training state on this rank.

    `source` stays the same tensor for the life of the run and is updated in place. A volatile
    slice is also written by forward and backward (router buffers), not by the update alone, so it
    is copied before the iteration starts.
    """

    operator: str
    tensor: str
    part: str
    start: int
    end: int
    source: torch.Tensor
    volatile: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the slice in bytes."""
        return self.source.numel() * self.source.element_size()


class OperatorSlices(NamedTuple):
    """What is captured of one operator: in full, or its compute weights only.

    What is in `always` is in every slot of a window, also in those after the one that has the
    operator in full: small state that a replay alone would not bring to the right values, as
    something between two iterations changes it (an evaluation).
    """

    full: tuple[TensorSlice, ...]
    light: tuple[TensorSlice, ...]
    always: tuple[TensorSlice, ...] = ()

    @property
    def full_bytes(self) -> int:
        """Bytes in a slot that holds the operator in full, alignment included."""
        return sum(align_up(item.nbytes) for item in self.full)

    @property
    def light_bytes(self) -> int:
        """Bytes in a slot that holds its compute weights only, alignment included."""
        return sum(align_up(item.nbytes) for item in self.light)

    @property
    def always_bytes(self) -> int:
        """Bytes in every slot besides, alignment included."""
        return sum(align_up(item.nbytes) for item in self.always)


class Copy(NamedTuple):
    """One copy into host memory."""

    target: torch.Tensor
    source: torch.Tensor


class Piece(NamedTuple):
    """Copies that are made together."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    nbytes: int

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> 'Piece':
        """Put copies together."""
        nbytes = sum(copy.source.nbytes for copy in copies)
        return cls([copy.target for copy in copies], [copy.source for copy in copies], nbytes)


def in_pieces(copies: Iterable[Copy], limit: int = PIECE_BYTES) -> list[Piece]:
    """Put copies together, in their order, and cut large ones up.

    Args:
        copies: flat tensors.
        limit: bytes of a piece at most.
    """
    parts = (part for copy in copies for part in _cut(copy, limit))
    batches = in_batches(parts, lambda part: part.source.nbytes, limit)
    return [Piece.of(batch) for batch in batches]


def _cut(copy: Copy, limit: int) -> Iterable[Copy]:
    if copy.source.nbytes <= limit:
        return (copy,)
    elements = limit // copy.source.itemsize
    return map(Copy, copy.target.split(elements), copy.source.split(elements))


class SlotLayout:
    """Places of all tensors of one slot.

    Args:
        plan: the window's plan.
        slot: index of the slot.
        operators: slices by operator; operators that this rank holds nothing of may be missing.

    Attributes:
        full: operators captured in full.
        light: operators of which the compute weights alone are captured.
        records: where each slice goes, in the order of the payload.
        payload_bytes: size of the payload.
    """

    def __init__(
        self, plan: WindowPlan, slot: int, operators: Mapping[str, OperatorSlices]
    ) -> None:
        self.full = plan.slots[slot]
        self.light = tuple(name for later in plan.slots[slot + 1 :] for name in later)
        self._slices = [
            *(item for name in self.full if name in operators for item in operators[name].full),
            *(item for name in self.light if name in operators for item in operators[name].light),
            *(item for held in operators.values() for item in held.always),
        ]
        self.records: list[Record] = []
        offset = 0
        for item in self._slices:
            self.records.append(_record(item, offset))
            offset += align_up(item.nbytes)
        self.payload_bytes = offset
        # By volatile or not, then by address. Views keep their map, so that it is of no other file.
        self._places: dict[bool, dict[int, list[Piece]]] = {True: {}, False: {}}

    def copies(self, payload: Bytes, volatile: bool) -> list[Piece]:
        """Copies of the volatile, or of the other, slices into the payload of a slot.

        The views are made once for each place of a payload; a few thousand of them take longer
        than the copies to be issued. Always called by the same thread for one of the two.

        Args:
            payload: uint8, shape [payload_bytes], in a mapped file.
            volatile: which of the two.
        """
        places, address = self._places[volatile], payload.ctypes.data
        if address not in places:
            if len(places) == _PLACES_KEPT:
                del places[next(iter(places))]
            places[address] = in_pieces(self._views(torch.from_numpy(payload), volatile))
        return places[address]

    def _views(self, payload: torch.Tensor, volatile: bool) -> Iterator[Copy]:
        for record, item in zip(self.records, self._slices, strict=True):
            if item.volatile is volatile and item.nbytes:
                place = payload[record.offset : record.offset + record.nbytes]
                yield Copy(place.view(item.source.dtype), item.source)


def _record(item: TensorSlice, offset: int) -> Record:
    return Record(
        operator=item.operator,
        tensor=item.tensor,
        part=item.part,
        dtype=dtype_name(item.source.dtype),
        start=item.start,
        end=item.end,
        offset=offset,
        nbytes=item.nbytes,
    )


def operator_table(
    names: Sequence[str], ranks: Sequence[Mapping[str, tuple[int, int]]]
) -> OperatorTable:
    """Sizes of all operators, as the planner takes them.

    Args:
        names: operators, in the order of the result.
        ranks: for each rank of the stage, full and light bytes by operator that it holds.
    """
    places = {name: place for place, name in enumerate(names)}
    sizes = np.zeros((2, len(names), len(ranks)), dtype=np.int64)
    for number, held in enumerate(ranks):
        rows = [places[name] for name in held]
        sizes[:, rows, number] = np.array(list(held.values()), dtype=np.int64).reshape(-1, 2).T
    return OperatorTable(list(names), *sizes)
