# SPDX-License-Identifier: Apache-2.0
"""Bytes of each operator on each rank of a stage, from a model's shape and a layout.

Operators, their names and their order equal those of training (embedding, `layer3.expert5`,
`layer3.router`, `layer3.rest`, head; experts first, turn by turn over the expert-parallel ranks).
With the distributed optimizer a rank captures its shard of each gradient bucket: a contiguous range
of the parameters in backward order, so that a rank holds much of few operators instead of a little
of all; weights that both ends of the pipeline share have their own bucket. Left out: alignment of
tensors, padding of buckets, router buffers and step counters. Every rank with a part of an operator
counts the scales of all tensors of the operator.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from moevement_ext.plan.byte_planner import OperatorTable

from ..lab.fields import require
from .layout import Layout, Precision
from .shape import ModelShape, Weights

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times the tensor parallelism."""
_BUCKET_ELEMENTS = 40_000_000
_BUCKET_ELEMENTS_PER_RANK = 1_000_000


class Piece(NamedTuple):
    """Contiguous elements of one operator on one rank, before sharding."""

    operator: str
    elements: int
    weights: Weights
    """The operator's weights, of which this is a rank's part."""
    alone: bool = False
    """True if the piece has its own bucket: weights shared by the first and the last stage."""


class ChunkPieces(NamedTuple):
    """Contents of the two gradient buffers of a model chunk, in forward order."""

    dense: list[Piece]
    experts: list[list[Piece]]
    """Pieces by expert-parallel rank; they differ only in names."""


def stage_kind(model: ModelShape, layout: Layout, stage: int) -> tuple[object, ...]:
    """A key that is equal for stages with equal bytes, whatever their layer numbers."""
    chunks = layout.layers_of(stage, model.layers)
    kinds = tuple(tuple(model.has_experts(layer) for layer in chunk) for chunk in chunks)
    return kinds, stage == 0, stage == layout.pipeline - 1


def operator_sizes(
    model: ModelShape, layout: Layout, precision: Precision, stage: int
) -> OperatorTable:
    """Operators of `stage` in capture order, with bytes for each rank of the stage's group.

    Raises FieldError: model and layout do not fit together.
    """
    pieces = [_chunk(model, layout, stage, chunk) for chunk in range(layout.chunks)]
    elements = _elements(layout, stage, pieces)
    weights: dict[str, Weights] = {}
    for chunk in pieces:
        for piece in chain(chunk.dense, *chunk.experts):
            weights[piece.operator] = weights.get(piece.operator, Weights()) + piece.weights
    names = capture_order(model, pieces)
    in_bytes = [_in_bytes(elements[name], weights[name], precision) for name in names]
    full, narrow = (np.stack(sizes) for sizes in zip(*in_bytes, strict=True))
    return OperatorTable(names, full, narrow)


def held_elements(model: ModelShape, layout: Layout, stage: int) -> int:
    """Number of parameters that a rank of `stage` computes with, regardless of ownership."""
    return sum(piece.elements for piece in _held(model, layout, stage))


def scaling_bytes(model: ModelShape, layout: Layout, precision: Precision, stage: int) -> int:
    """Bytes of delayed scaling's state on a rank of `stage`, which every slot has."""
    matrices = sum(piece.weights.matrices for piece in _held(model, layout, stage))
    return matrices * precision.scaling_bytes


def _held(model: ModelShape, layout: Layout, stage: int) -> list[Piece]:
    chunks = [_chunk(model, layout, stage, chunk) for chunk in range(layout.chunks)]
    return [piece for chunk in chunks for piece in (*chunk.dense, *chunk.experts[0])]


def capture_order(model: ModelShape, chunks: Sequence[ChunkPieces]) -> list[str]:
    """Operators in order: tied embedding and head, experts turn by turn over ranks, all others."""
    dense = list(dict.fromkeys(piece.operator for chunk in chunks for piece in chunk.dense))
    turns = zip(
        *(
            [piece.operator for chunk in chunks for piece in chunk.experts[rank]]
            for rank in range(len(chunks[0].experts))
        ),
        strict=True,
    )
    tied = [name for name in dense if model.tied_embeddings and name in ('embedding', 'head')]
    return [
        *tied,
        *(name for turn in turns for name in turn),
        *(name for name in dense if name not in tied),
    ]


def shard(elements: Sequence[int], shards: int, bucket: int | None) -> np.ndarray:
    """Elements of each piece that each shard owns, int64 (pieces, shards).

    The buffer has the pieces in reverse order; a bucket ends with the first piece that makes it
    reach `bucket` elements (None: one bucket), and every bucket is divided into equal shards.
    """
    sizes = np.array(elements, dtype=np.int64)[::-1]
    owned = np.zeros((len(sizes), shards), dtype=np.int64)
    start = 0
    while start < len(sizes):
        filled = sizes[start:].cumsum()
        count = len(filled)
        if bucket is not None and filled[-1] > bucket:
            count = int(np.searchsorted(filled, bucket)) + 1
        ends = filled[:count, None]
        begins = ends - sizes[start : start + count, None]
        size = -(-int(filled[count - 1]) // shards)
        lows = np.arange(shards) * size
        overlap = np.minimum(ends, lows + size) - np.maximum(begins, lows)
        owned[start : start + count] = np.maximum(overlap, 0)
        start += count
    return owned[::-1]


def _in_bytes(
    elements: np.ndarray, weights: Weights, precision: Precision
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes on each rank of an operator in full, and of its compute weights."""
    scales = weights.matrices * precision.weight_scale_bytes * (elements > 0)
    narrow = elements * precision.weight_bytes + scales
    of_state = weights.tensors * precision.state_scale_bytes * (elements > 0)
    return elements * precision.full_bytes + scales + of_state, narrow


def _elements(layout: Layout, stage: int, chunks: Sequence[ChunkPieces]) -> dict[str, np.ndarray]:
    """Elements of each operator on each rank of the stage, int64 (ranks,)."""
    rank = np.arange(layout.stage_ranks)
    expert_rank = rank // layout.expert_parts % layout.expert
    dense_shard = rank // layout.tensor
    expert_shard = rank // (layout.expert_parts * layout.expert)
    found: dict[str, np.ndarray] = {}
    for index, chunk in enumerate(chunks):
        group = layout.data * layout.context // layout.instances
        owned = _owned(layout, chunk.dense, group, stage, index)
        for piece, row in zip(chunk.dense, owned, strict=True):
            found[piece.operator] = found.get(piece.operator, 0) + row[dense_shard % group]
        group = layout.expert_data // layout.instances
        owned = _owned(layout, chunk.experts[0], group, stage, index)
        for holder, pieces in enumerate(chunk.experts):
            for piece, row in zip(pieces, owned, strict=True):
                found[piece.operator] = np.where(
                    expert_rank == holder, row[expert_shard % group], 0
                )
    return found


def _owned(
    layout: Layout, pieces: Sequence[Piece], group: int, stage: int, chunk: int
) -> np.ndarray:
    """Elements of each piece that each rank of a group owns, int64 [pieces, group].

    Computed by `shard`; without the distributed optimizer every rank of the group owns all.
    """
    elements = [piece.elements for piece in pieces]
    if not layout.distributed_optimizer:
        return np.tile(np.array(elements, dtype=np.int64)[:, None], (1, group))
    bucket = None
    if layout.overlap_grad_reduce and stage == 0 and chunk == 0:  # upstream limits no other buckets
        ranks = layout.data * layout.context
        bucket = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * ranks)
    owned = np.empty((len(pieces), group), dtype=np.int64)
    together = [index for index, piece in enumerate(pieces) if not piece.alone]
    owned[together] = shard([elements[index] for index in together], group, bucket)
    for index in set(range(len(pieces))) - set(together):
        owned[index] = shard([elements[index]], group, None)
    return owned


def _chunk(model: ModelShape, layout: Layout, stage: int, chunk: int) -> ChunkPieces:
    rule = f'must divide the {model.experts} experts of the model'
    require(model.experts % layout.expert == 0, 'expert', layout.expert, rule)
    dense: list[Piece] = []
    experts: list[list[Piece]] = [[] for _ in range(layout.expert)]
    unit = VOCABULARY_MULTIPLE * layout.tensor
    vocabulary = -(-model.vocab_size // unit) * unit
    shared = model.tied_embeddings and layout.pipeline > 1
    if stage == 0 and chunk == 0:
        dense.append(_piece('embedding', model.words(vocabulary), layout.tensor, shared))
        if model.learned_positions:
            dense.append(_piece('embedding', model.positions, layout.tensor))
    for layer in layout.layers_of(stage, model.layers)[chunk]:
        dense.append(_piece(f'layer{layer}.rest', model.rest(layer), layout.tensor))
        if model.has_experts(layer):
            dense.append(_piece(f'layer{layer}.router', model.router(), layout.tensor))
            for rank, pieces in enumerate(experts):
                pieces.extend(_local_experts(model, layout, layer, rank))
    if stage == layout.pipeline - 1 and chunk == layout.chunks - 1:
        dense.append(_piece('head', model.norm, layout.tensor))
        if shared or not model.tied_embeddings:
            dense.append(_piece('head', model.words(vocabulary), layout.tensor, shared))
    return ChunkPieces(dense, experts)


def _piece(operator: str, weights: Weights, tensor: int, alone: bool = False) -> Piece:
    return Piece(operator, weights.per_rank(tensor), weights, alone)


def _local_experts(model: ModelShape, layout: Layout, layer: int, rank: int) -> list[Piece]:
    local = model.experts // layout.expert
    first = rank * local
    return [
        _piece(f'layer{layer}.expert{number}', model.expert(), layout.expert_parts)
        for number in range(first, first + local)
    ]
