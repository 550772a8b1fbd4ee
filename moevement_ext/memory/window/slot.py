# SPDX-License-Identifier: Apache-2.0
"""The typed header of one slot, captured after one iteration of a window (paper sec. 3.2).

A *window* is W consecutive iterations beginning at iteration `start`; slot i holds the slice
captured of the state after iteration `start + i`. A header travels as a *frame*: the xxh3_64 of the
encoded header followed by the header itself, so that header and context verify themselves, in a
file as on the wire. The header holds the checksums of all records, so the checksum of a frame
identifies the content of a whole slot.
"""

import struct
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.name import Count, WindowName
from moevement_ext.memory.window.settings import Placed

FORMAT_VERSION = 5
ALIGNMENT = 64

LOSS_BYTES = 16
"""At least the bytes that a loss adds to an encoded context."""

_CHECKSUM = struct.Struct('<Q')

_ENCODER = msgspec.msgpack.Encoder()
Range = tuple[Count, Count, Count]
"""First byte in the payload, first byte in the earlier one, and number of bytes."""


class RangeKey(NamedTuple):
    """Identity of a captured range, for comparison of slots and models."""

    operator: str
    tensor: str
    part: str
    dtype: str
    start: int
    end: int

    def __str__(self) -> str:
        return f'{self.tensor} ({self.part}, {self.dtype}, elements {self.start} to {self.end})'


class Record(msgspec.Struct, kw_only=True, frozen=True, array_like=True):
    """One captured tensor range inside the payload of a slot."""

    operator: str
    """Operator of the tensor: one expert, one router, or the rest of a layer."""
    tensor: str
    """Parameter or buffer name, e.g. `decoder.layers.0.mlp.router.weight`."""
    part: str
    """`master`, `exp_avg`, `exp_avg_sq`, `step`, `weight` or `buffer`."""
    dtype: str
    """`float32`, `bfloat16`, ..."""
    start: Count
    """First covered element of the flat parameter."""
    end: Count
    """One past the last covered element."""
    offset: Count
    """Byte offset within the slot payload, a multiple of 64."""
    nbytes: Count
    checksum: Count = 0
    """xxh3_64 of the bytes; 0 until the slot is sealed."""

    @property
    def key(self) -> RangeKey:
        return RangeKey(self.operator, self.tensor, self.part, self.dtype, self.start, self.end)


class SlotHeader(msgspec.Struct):
    """All information to read one slot without trusting its file name."""

    version: Count
    """`FORMAT_VERSION` of the writer."""
    run: str
    topology: str
    owner: Count
    """Rank whose state the slot holds."""
    start: Count
    """First iteration of the window."""
    window: Annotated[int, msgspec.Meta(ge=1)]
    """W, iterations (and slots) in the window."""
    slot: Count
    """Index of this slot, `0 <= slot < window`."""
    iteration: Count
    """The iteration after which the slice was captured, `start + slot`."""
    plan: str
    """History and plan (see `WindowName`)."""
    payload_bytes: Count
    records: list[Record]
    context: bytes = b''
    """Opaque auxiliary state (RNG, schedulers, ...), covered by the checksum of the frame."""
    settings: bytes = b''
    """In slot 0: encoded settings of the job (see `settings`)."""
    placed: Placed | None = None
    """Layout and place of the owner; None if the trainer has none."""

    @property
    def name(self) -> WindowName:
        return WindowName(self.start, self.plan)


_DECODER = msgspec.msgpack.Decoder(SlotHeader)


def align_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def encode_frame(header: SlotHeader) -> bytes:
    """Self-verifying frame of a header: 8 bytes of xxh3_64, then the encoded header."""
    encoded = _ENCODER.encode(header)
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(encoded)) + encoded


def frame_checksum(frame: bytes | memoryview) -> int:
    """Checksum that a frame carries; equal checksums mean equal slots, payload included."""
    checksum: int = _CHECKSUM.unpack_from(frame)[0]
    return checksum


def decode_frame(frame: bytes | memoryview) -> SlotHeader:
    """Verify and decode a frame; `ValueError` if it is damaged or holds no slot header."""
    if len(frame) < _CHECKSUM.size:
        raise ValueError(f'header frame has only {len(frame)} bytes')
    encoded = memoryview(frame)[_CHECKSUM.size :]
    if xxhash.xxh3_64_intdigest(encoded) != frame_checksum(frame):
        raise ValueError('checksum of the slot header does not match')
    try:
        header = _DECODER.decode(encoded)
        if header.settings:
            settings.decode(header.settings)  # later comparisons can rely on them
        return header
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f'slot header cannot be decoded: {error}') from error


def frame_bytes_bound(header: SlotHeader) -> int:
    """Upper bound in bytes of the frame of `header`, for any checksums and iteration.

    Called when windows are sized, before any capture. An integer takes 1 to 9 bytes in msgpack,
    so every checksum may grow by 8, and so may each of the seven integer fields. The context
    must already have its final length.
    """
    return _CHECKSUM.size + len(_ENCODER.encode(header)) + 8 * (len(header.records) + 7)


class ExpertCopy(msgspec.Struct, frozen=True, array_like=True):
    """State of one expert in a slot of a lossy strategy, possibly of an earlier iteration.

    Counts tokens of this rank's micro-batches that were routed to the expert.
    """

    version: Count
    """Iteration of the state in the slot."""
    learned: float
    """Tokens whose updates are in that state, or that were lost before."""
    routed: float
    """Tokens by the iteration of the slot."""


class ExpertCopies(msgspec.Struct, frozen=True):
    """State of all experts of the stage in a slot; the same on every rank of the stage."""

    experts: dict[str, ExpertCopy]
    since: Count
    """Iteration from which on tokens were counted."""
    lost: float
    """Tokens whose updates were lost in earlier recoveries."""
    most: Count = 0
    """Most experts of a layer in a checkpoint of the job until then; 0: unknown."""
    lost_before: float = 0.0
    """Share of tokens, over all ranks, that was lost before that number came into force."""

    @property
    def unsaved(self) -> float:
        """Tokens that are lost by a recovery from this slot."""
        return sum(copy.routed - copy.learned for copy in self.experts.values())

    def older_than(self, iteration: int) -> frozenset[str]:
        """Experts whose state is of an earlier iteration."""
        return frozenset(name for name, copy in self.experts.items() if copy.version < iteration)


class SlotContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """Operators in a slot, on every rank of the stage, and the auxiliary state.

    The records alone do not show this: a rank may hold no bytes of an operator of its peers.
    """

    full: list[str]
    """Operators captured in full in this slot, active from here on."""
    weights: list[str]
    """Operators captured as compute weights, still frozen."""
    state: bytes
    """Encoded RNG, scheduler, scaler and data position, opaque to the engine."""
    copies: ExpertCopies | None = None
    """Versions and token counts of experts, under a lossy strategy."""
    loss: float | None = None
    """Loss of the owner in the iteration that led here; None if it had none."""


_CONTEXT = msgspec.msgpack.Decoder(SlotContext)


def older_experts(header: SlotHeader) -> frozenset[str]:
    """Experts whose state in a slot of a lossy strategy is of an earlier iteration."""
    copies = decode_context(header.context).copies if header.context else None
    return frozenset() if copies is None else copies.older_than(header.iteration)


def decode_context(encoded: bytes) -> SlotContext:
    """Decode the context of a verified slot header; `msgspec.MsgspecError` for other bytes."""
    return _CONTEXT.decode(encoded)


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """Ranges of the payload of a window of one slot."""

    window: WindowName
    """The earlier window of the same owner that contains the ranges."""
    ranges: list[Range]
    """In the order of the payload; they do not overlap."""

    def rest(self, nbytes: int, earlier: int | None = None) -> list[tuple[int, int]]:
        """Begin and end of the gaps between the ranges, in a payload of `nbytes`.

        Raises `ValueError` if the ranges are not in order, or not within this payload and
        the earlier one of `earlier` bytes (None: not checked).
        """
        found, end = [], 0
        for begin, there, count in self.ranges:
            if begin < end or begin + count > nbytes or there + count > (earlier or there + count):
                raise ValueError(f'bytes {begin} to {begin + count} of {nbytes} are out of order')
            found += [(end, begin)] if begin > end else []
            end = begin + count
        return found + ([(end, nbytes)] if nbytes > end else [])

    def copy(self, base: Bytes, payload: Bytes) -> None:
        """Copy the ranges from the earlier payload; `rest` has checked them."""
        for here, there, count in self.ranges:
            payload[here : here + count] = base[there : there + count]


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Merge adjacent ranges."""
    found: list[Range] = []
    for here, there, count in ranges:
        begin, from_, before = found[-1] if found else (-1, -1, 0)
        if (begin + before, from_ + before) == (here, there):
            found[-1] = begin, from_, before + count
        else:
            found.append((here, there, count))
    return found
