# SPDX-License-Identifier: Apache-2.0
"""Slices of the training state, and their places in a slot: computed per plan, not iteration."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.tensors import dtype_name, in_batches
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import (
    Record,
    SlotContext,
    SlotHeader,
    align_up,
    decode_context,
)
from moevement_ext.plan.byte_planner import OperatorTable, WindowPlan

PIECE_BYTES = 32 * 2**20
"""Size of a queued copy; other copies from the device wait behind at most two pieces."""
# Per file: the offset of a slot depends on when earlier slots were sealed.
_PLACES_KEPT = 2


@dataclass(frozen=True, eq=False)
class TensorSlice:
    """A flat, contiguous part of the training state on this rank.

    `source` stays the same tensor for the whole run and is updated in place. A volatile
    slice is also written by forward and backward (router buffers), not only by the update, so it
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
        return self.source.numel() * self.source.element_size()

    def record(self, offset: int = 0) -> Record:
        """The record of this slice at `offset` in a payload."""
        return Record(
            operator=self.operator,
            tensor=self.tensor,
            part=self.part,
            dtype=dtype_name(self.source.dtype),
            start=self.start,
            end=self.end,
            offset=offset,
            nbytes=self.nbytes,
        )


class OperatorSlices(NamedTuple):
    """Captured slices of one operator: in full, or its compute weights only.

    The slices in `always` are in every slot of a window, also after the slot with the operator in
    full: auxiliary state that a replay cannot reproduce, as code between two iterations (an
    evaluation) changes it.
    """

    full: tuple[TensorSlice, ...]
    weights: tuple[TensorSlice, ...]
    always: tuple[TensorSlice, ...] = ()

    @property
    def full_bytes(self) -> int:
        """Bytes in a slot that holds the operator in full, alignment included."""
        return sum(align_up(item.nbytes) for item in self.full)

    @property
    def weight_bytes(self) -> int:
        """Bytes in a slot that holds only the compute weights, alignment included."""
        return sum(align_up(item.nbytes) for item in self.weights)

    @property
    def always_bytes(self) -> int:
        """Bytes of `always` in every slot, alignment included."""
        return sum(align_up(item.nbytes) for item in self.always)


class Operators(Protocol):
    """The training state of this rank, operator by operator."""

    @property
    def slices(self) -> Mapping[str, OperatorSlices]: ...

    @property
    def kinds(self) -> Mapping[str, str]:
        """Kind by operator: 'expert' if ordered by load; any other word otherwise."""

    @property
    def tied(self) -> Sequence[str]:
        """Operators whose weights the first and last stage share."""

    @property
    def device(self) -> torch.device: ...

    def renew(self) -> None:
        """Look up all tensors again, after a checkpoint was loaded, which may replace them."""

    def check(self, header: SlotHeader) -> None:
        """Refuse the records of a slot of another model, with a `RefusedWindow`."""

    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        """Load a verified slot into the model. Collective over the ranks of the stage."""

    def freeze(self, names: Collection[str]) -> None:
        """Freeze exactly these: forward and input gradient, but no weight gradient, no update."""

    def copy(self, source: int) -> None:
        """Copy the state of rank `source`. Collective over the ranks with the same state."""


class _Copy(NamedTuple):
    """One copy into host memory."""

    target: torch.Tensor
    source: torch.Tensor


class Piece(NamedTuple):
    """Copies that run in one call."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    nbytes: int

    @classmethod
    def of(cls, copies: Sequence[_Copy]) -> 'Piece':
        nbytes = sum(copy.source.nbytes for copy in copies)
        return cls([copy.target for copy in copies], [copy.source for copy in copies], nbytes)


def in_pieces(copies: Iterable[_Copy], limit: int = PIECE_BYTES) -> list[Piece]:
    """Group copies of flat tensors in order into pieces of `limit` bytes, and split large ones."""
    parts = (part for copy in copies for part in _cut(copy, limit))
    batches = in_batches(parts, lambda part: part.source.nbytes, limit)
    return [Piece.of(batch) for batch in batches]


def _cut(copy: _Copy, limit: int) -> Iterable[_Copy]:
    if copy.source.nbytes <= limit:
        return (copy,)
    elements = limit // copy.source.itemsize
    return map(_Copy, copy.target.split(elements), copy.source.split(elements))


class SlotLayout:
    """Places of all tensors of one slot of a plan.

    `operators` has the slices by operator; those without slices on this rank may be missing.

    Attributes:
        full: operators captured in full.
        weights: operators captured as compute weights only.
        records: place of each slice, in the order of the payload.
        payload_bytes: size of the payload.
    """

    def __init__(
        self, plan: WindowPlan, slot: int, operators: Mapping[str, OperatorSlices]
    ) -> None:
        self.full = plan.slots[slot]
        self.weights = tuple(name for later in plan.slots[slot + 1 :] for name in later)
        self._slices = [*slices_of(self.full, self.weights, operators)]
        self._always = sum(len(held.always) for held in operators.values())
        self.records: list[Record] = []
        offset = 0
        for item in self._slices:
            self.records.append(item.record(offset))
            offset += align_up(item.nbytes)
        self.payload_bytes = offset
        # By volatility, file and address. Views keep the map of a file alive, so that its address
        # is not reused. They are dropped with the file object, and the pages of a removed file are
        # freed.
        self._places: dict[bool, WeakKeyDictionary[WindowFile, dict[int, list[Piece]]]] = {
            True: WeakKeyDictionary(),
            False: WeakKeyDictionary(),
        }

    def left_out(self, operators: Collection[str]) -> list[Record]:
        """Records that `copies` omits, as an earlier window provides them."""
        return [self.records[index] for index in self._left_out(operators)]

    def _left_out(self, operators: Collection[str]) -> list[int]:
        ends = len(self.records) - self._always
        return [index for index in range(ends) if self.records[index].operator in operators]

    def copies(
        self,
        payload: Bytes,
        volatile: bool,
        without: Collection[str] = (),
        file: WindowFile | None = None,
    ) -> list[Piece]:
        """Copies of the volatile or of the stable slices into the payload of a slot.

        Views are created once per place of a payload in a `file`, since a few thousand views take
        longer than issuing the copies. One thread calls this for volatile slices, one for
        stable slices.

        Args:
            payload: uint8, shape [payload_bytes], in a mapped file.
            volatile: selects volatile or stable slices.
            without: operators of which only the `always` slices are copied.
            file: that file; None: another payload, whose views are not kept.
        """
        if without or file is None:
            left_out = set(self._left_out(without))
            return in_pieces(self._views(torch.from_numpy(payload), volatile, left_out))
        places, address = self._places[volatile].setdefault(file, {}), payload.ctypes.data
        if address not in places:
            if len(places) == _PLACES_KEPT:
                del places[next(iter(places))]
            places[address] = in_pieces(self._views(torch.from_numpy(payload), volatile))
        return places[address]

    def _views(
        self, payload: torch.Tensor, volatile: bool, left_out: Collection[int] = ()
    ) -> Iterator[_Copy]:
        pairs = zip(self.records, self._slices, strict=True)
        for index, (record, item) in enumerate(pairs):
            if item.volatile is volatile and item.nbytes and index not in left_out:
                place = payload[record.offset : record.offset + record.nbytes]
                yield _Copy(place.view(item.source.dtype), item.source)


def check_fits(header: SlotHeader, slices: Mapping[str, OperatorSlices]) -> None:
    """Check that a slot has all records that `slices` of this rank need, and no others.

    Raises `RefusedWindow` if the slot belongs to another model; the message names a parameter.
    """
    context = decode_context(header.context)
    needed = {item.record().key for item in slices_of(context.full, context.weights, slices)}
    held = {record.key for record in header.records}
    where = f'slot {header.slot} of window {header.start}'
    for part in sorted(needed - held):
        raise RefusedWindow(f'{where} has no {part} of {part.operator}, which the model needs')
    for part in sorted(held - needed):
        raise RefusedWindow(f'{where} has {part} of {part.operator}, which the model does not have')
    absent = slices.keys() - {*context.full, *context.weights}
    if header.slot == 0 and absent:
        raise RefusedWindow(f'{where} has no record of {min(absent)}, which the model has')


def slices_of(
    full: Iterable[str], weights: Iterable[str], slices: Mapping[str, OperatorSlices]
) -> Iterator[TensorSlice]:
    """Slices of a slot with these operators, in the order of its payload."""
    for name in full:
        if name in slices:
            yield from slices[name].full
    for name in weights:
        if name in slices:
            yield from slices[name].weights
    for held in slices.values():
        yield from held.always


def operator_table(
    names: Sequence[str], ranks: Sequence[Mapping[str, tuple[int, int]]]
) -> OperatorTable:
    """Sizes of all operators, in the planner's form, in the order of `names`.

    `ranks` has, for each rank of the stage, full and weight bytes by operator.
    """
    places = {name: place for place, name in enumerate(names)}
    sizes = np.zeros((2, len(names), len(ranks)), dtype=np.int64)
    for number, held in enumerate(ranks):
        rows = [places[name] for name in held]
        sizes[:, rows, number] = np.array(list(held.values()), dtype=np.int64).reshape(-1, 2).T
    return OperatorTable(list(names), *sizes)
