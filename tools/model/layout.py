# SPDX-License-Identifier: Apache-2.0
"""Layout of a training job over its GPUs: parallelism, batch and precisions.

Ranks are numbered in Megatron's default order: tensor, context, data, pipeline, from the innermost;
for experts: expert tensor, expert, expert data, pipeline. So the ranks of a stage are consecutive.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..lab.fields import Count, Whole, require

_BYTES = {'fp8': 1, 'fp16': 2, 'bf16': 2, 'fp32': 4}
_RULE = Meta(description=f'give one of {", ".join(_BYTES)}')
Format = Annotated[Literal['fp8', 'fp16', 'bf16', 'fp32'], _RULE]
_SCALED = ('fp8', 'fp16')
_SCALE_BYTES = 4
_TENSORS_OF_PRODUCT = 5  # input, weight, output, and two gradients


class Precision(Struct, frozen=True, forbid_unknown_fields=True):
    """Number formats of the training state: fp8, fp16, bf16 or fp32.

    Byte counts are those of an exact recovery; those of a parameter exclude the scales.
    """

    compute: Format = 'bf16'
    """Weights that forward and backward read; a capture of compute weights has only these."""
    master: Format = 'fp32'
    first_moment: Format = 'fp32'
    second_moment: Format = 'fp32'
    boundary: Format = 'bf16'
    """Activations and gradients between pipeline stages."""
    amax_history: Count = 0
    """Passes that delayed scaling remembers; 0: another kind of scaling, which remembers none."""

    def __post_init__(self) -> None:
        rule = f'needs master fp32, not {self.master}: an fp32 weight is its own master'
        good = self.compute != 'fp32' or self.master == 'fp32'
        require(good, 'compute', self.compute, rule)

    @property
    def weight_beside_master(self) -> bool:
        """True if the stored master does not determine the weight.

        A weight is rounded from the result of the update. An fp32 master equals that result; a
        narrower master is rounded itself. An fp8 weight is also rounded with its own scale.
        """
        return self.master != 'fp32' or self.compute == 'fp8'

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the master and two moments, per parameter."""
        return sum(_BYTES[name] for name in (self.master, self.first_moment, self.second_moment))

    @property
    def full_bytes(self) -> int:
        """Bytes of a full capture per parameter: optimizer state, and the weight if required."""
        return self.optimizer_bytes + (self.weight_bytes if self.weight_beside_master else 0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a capture of compute weights per parameter: the compute weight."""
        return _BYTES[self.compute]

    @property
    def weight_scale_bytes(self) -> int:
        """Bytes of each matrix's scale in a capture, full or weights."""
        return _SCALE_BYTES if self.compute == 'fp8' else 0

    @property
    def state_scale_bytes(self) -> int:
        """Bytes of each tensor's scales in a full capture: one scale for each state of fp8 or fp16.

        Fewer where Megatron holds the masters, which requires fp32 masters.
        """
        states = (self.master, self.first_moment, self.second_moment)
        return _SCALE_BYTES * sum(name in _SCALED for name in states)

    @property
    def scaling_bytes(self) -> int:
        """Bytes of each matrix in every slot: scales and amax history of delayed scaling."""
        rows = 1 + self.amax_history
        return _SCALE_BYTES * _TENSORS_OF_PRODUCT * rows if self.amax_history else 0

    @property
    def boundary_bytes(self) -> int:
        return _BYTES[self.boundary]


PRECISIONS = {
    'bf16': Precision(),
    'c1': Precision('fp16', 'fp16', 'fp16', 'fp16', 'fp16'),
    'c2': Precision('fp8', 'fp32', 'fp32', 'fp32'),
    'c3': Precision('fp8', 'fp16', 'fp32', 'fp32', amax_history=1),
    'c4': Precision('fp8', 'fp16', 'fp8', 'fp16', amax_history=1),
    'c5': Precision('fp8', 'fp8', 'fp8', 'fp16', amax_history=1),
}
"""Precisions by name; C1 to C5 are those of the paper's Table 7.

Upstream supports fp8 weights with narrow masters only with delayed scaling.
"""


class Batch(Struct, frozen=True, forbid_unknown_fields=True):
    """The samples of an iteration."""

    sequence_length: Whole = 4096
    micro_batch_size: Whole = 1
    global_batch_size: Whole = 512

    @property
    def tokens(self) -> int:
        return self.sequence_length * self.global_batch_size

    def micro_batches(self, data: int) -> int:
        """Micro-batches per iteration on each of `data` data-parallel ranks.

        Raises FieldError: the global batch is not a multiple.
        """
        at_once = self.micro_batch_size * data
        rule = f'give a multiple of micro_batch_size x data parallelism = {at_once}'
        good = self.global_batch_size % at_once == 0
        require(good, 'global_batch_size', self.global_batch_size, rule)
        return self.global_batch_size // at_once


class Layout(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the parallel groups."""

    ranks: Whole
    pipeline: Whole = 1
    expert: Whole = 1
    tensor: Whole = 1
    context: Whole = 1
    expert_tensor: Whole | None = None
    """Tensor parallelism within an expert; None: equal to `tensor`."""
    chunks: Whole = 1
    """Model chunks (virtual stages) per pipeline rank."""
    layers_per_stage: tuple[Count, ...] | None = None
    """None: as equal as possible; the first and last stage (which also hold embedding and head)
    have no more layers than any other."""
    distributed_optimizer: bool = True
    """Masters and moments are sharded over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced in buckets; each rank owns a shard of each bucket."""
    instances: Whole = 1
    """Instances of the distributed optimizer, each with all masters and moments."""
    sequence_parallel: bool = False
    """Activations between stages are sharded over the tensor-parallel ranks."""

    def __post_init__(self) -> None:
        whole, experts = self.tensor * self.context * self.pipeline, self.expert * self.expert_parts
        good = self.ranks % whole == 0
        rule = f'give a multiple of tensor x context x pipeline = {whole}'
        require(good, 'ranks', self.ranks, rule)
        good = self.stage_ranks % experts == 0
        rule = f'expert x expert_tensor = {experts} must divide the {self.stage_ranks} ranks of a'
        require(good, 'expert', self.expert, f'{rule} stage')
        good = self.instances == 1 or self.distributed_optimizer
        rule = 'goes with the distributed optimizer (--use-distributed-optimizer)'
        require(good, 'instances', self.instances, rule)
        groups = self.data * self.context, self.expert_data
        good = all(group % self.instances == 0 for group in groups)
        rule = f'must divide {groups[0]} ranks with equal weights, and {groups[1]} of experts'
        require(good, 'instances', self.instances, rule)
        good = self.layers_per_stage is None or len(self.layers_per_stage) == self.pipeline
        rule = f'give 0 or more layers for each of the {self.pipeline} stages'
        require(good, 'layers_per_stage', self.layers_per_stage, rule)
        good = self.layers_per_stage is None or self.chunks == 1
        require(good, 'chunks', self.chunks, 'with layers_per_stage give 1: chunks are of one size')

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage, all of which roll back together."""
        return self.ranks // self.pipeline

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, as Megatron counts them (without context parallelism)."""
        return self.stage_ranks // (self.tensor * self.context)

    @property
    def expert_parts(self) -> int:
        """Number of ranks that share one expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_data(self) -> int:
        """Number of ranks of a stage that compute with the same part of the same experts."""
        return self.stage_ranks // (self.expert * self.expert_parts)

    @property
    def units(self) -> int:
        """Number of pipelines that no expert or context parallelism connects."""
        experts = self.expert * self.expert_parts
        return self.stage_ranks // max(self.tensor * self.context, experts)

    def families(self) -> list[int]:
        """The lowest rank with the same shards of weights, masters and moments, by global rank.

        Each rank itself without several instances of the distributed optimizer.
        """
        if self.instances == 1:
            return list(range(self.ranks))
        lowest: dict[tuple[int, ...], int] = {}
        return [lowest.setdefault(self._shards(rank), rank) for rank in range(self.ranks)]

    def _shards(self, rank: int) -> tuple[int, ...]:
        """Stage, part and shard of a rank, among dense weights and among experts."""
        stage, place = divmod(rank, self.stage_ranks)
        dense, tensor = divmod(place, self.tensor)
        part, expert_tensor = divmod(place, self.expert_parts)
        shard, expert = divmod(part, self.expert)
        dense %= self.data * self.context // self.instances
        shard %= self.expert_data // self.instances
        return stage, tensor, dense, expert_tensor, expert, shard

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_ranks

    def layers_of(self, stage: int, layers: int) -> list[list[int]]:
        """Numbers (from 1) of the layers of each chunk of `stage`, for a model of `layers`.

        Raises FieldError: the layers cannot be distributed as described.
        """
        if self.chunks > 1:
            slots = self.pipeline * self.chunks
            rule = f'must divide the {layers} layers of the model together with pipeline'
            require(layers % slots == 0, 'chunks', self.chunks, rule)
            size = layers // slots
            firsts = (1 + size * (chunk * self.pipeline + stage) for chunk in range(self.chunks))
            return [list(range(first, first + size)) for first in firsts]
        counts = self.layers_per_stage or spread(layers, self.pipeline)
        rule = f'must add up to the {layers} layers of the model'
        require(sum(counts) == layers, 'layers_per_stage', counts, rule)
        rule = f'stages between the first and the last need a layer each, of {layers}'
        require(0 not in counts[1:-1], 'pipeline', self.pipeline, rule)
        first = 1 + sum(counts[:stage])
        return [list(range(first, first + counts[stage]))]


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as possible; the remainder goes to the middle stages."""
    least, left = divmod(layers, stages)
    first = (stages - left) // 2
    return tuple(least + (first <= stage < first + left) for stage in range(stages))
