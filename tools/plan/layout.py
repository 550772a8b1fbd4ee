# SPDX-License-Identifier: Apache-2.0
"""How a training job is laid out over its GPUs: parallelism, batch and precisions.

Ranks are numbered as Megatron's default order does: tensor, context, data, pipeline, from the
innermost; for experts: expert tensor, expert, expert data, pipeline. So the ranks of a stage are
consecutive.
"""

from dataclasses import dataclass

from tools.simulate import fields

_BYTES = {'fp8': 1, 'fp16': 2, 'bf16': 2, 'fp32': 4}
_SCALED = ('fp8', 'fp16')
_SCALE_BYTES = 4
_TENSORS_OF_PRODUCT = 5  # what goes in, the weight, what comes out, and two gradients


@dataclass(frozen=True)
class Precision:
    """Number formats of the training state: fp8, fp16, bf16 or fp32.

    Bytes are those that an exact recovery needs; those of a parameter are without the scales.
    """

    compute: str = 'bf16'
    """Weights that forward and backward read: the light capture."""
    master: str = 'fp32'
    first_moment: str = 'fp32'
    second_moment: str = 'fp32'
    """The second moment of Adam; `first_moment` is its first."""
    boundary: str = 'bf16'
    """Activations and gradients between pipeline stages."""
    amax_history: int = 0
    """Passes that delayed scaling remembers; 0: another scaling, which remembers nothing."""

    def __post_init__(self) -> None:
        formats = dict(vars(self))
        fields.whole('amax_history', formats.pop('amax_history'), least=0)
        for name, value in formats.items():
            fields.require(value in _BYTES, name, value, f'give one of {", ".join(_BYTES)}')
        rule = f'goes with master fp32, not {self.master}: such a weight is its own master'
        good = self.compute != 'fp32' or self.master == 'fp32'
        fields.require(good, 'compute', self.compute, rule)

    @property
    def weight_beside_master(self) -> bool:
        """True if the weight cannot be made from the master as it is stored.

        A weight is rounded from what the update computes: that is an fp32 master, but a narrower
        one is rounded itself. An fp8 weight is rounded with a scale of its own.
        """
        return self.master != 'fp32' or self.compute == 'fp8'

    @property
    def optimizer_bytes(self) -> int:
        """Bytes per parameter of the master and two moments."""
        return sum(_BYTES[name] for name in (self.master, self.first_moment, self.second_moment))

    @property
    def full_bytes(self) -> int:
        """Bytes per parameter of a full capture: the optimizer's, and the weight if need be."""
        return self.optimizer_bytes + (self.light_bytes if self.weight_beside_master else 0)

    @property
    def light_bytes(self) -> int:
        """Bytes per parameter of a light capture: the compute weight."""
        return _BYTES[self.compute]

    @property
    def weight_scale_bytes(self) -> int:
        """Bytes of the scale of each matrix in a capture, full or light."""
        return _SCALE_BYTES if self.compute == 'fp8' else 0

    @property
    def state_scale_bytes(self) -> int:
        """Bytes of the scales of each tensor in a full capture: one for each state of fp8 or fp16.

        Fewer where Megatron holds the masters, which takes fp32 ones.
        """
        states = (self.master, self.first_moment, self.second_moment)
        return _SCALE_BYTES * sum(name in _SCALED for name in states)

    @property
    def scaling_bytes(self) -> int:
        """Bytes of each matrix in every slot: scales and largest values of delayed scaling."""
        rows = 1 + self.amax_history
        return _SCALE_BYTES * _TENSORS_OF_PRODUCT * rows if self.amax_history else 0

    @property
    def boundary_bytes(self) -> int:
        """Bytes per element that passes between stages."""
        return _BYTES[self.boundary]


PRECISIONS = {
    'bf16': Precision(),
    'c1': Precision('fp16', 'fp16', 'fp16', 'fp16', 'fp16'),
    'c2': Precision('fp8', 'fp32', 'fp32', 'fp32'),
    'c3': Precision('fp8', 'fp16', 'fp32', 'fp32', amax_history=1),
    'c4': Precision('fp8', 'fp16', 'fp8', 'fp16', amax_history=1),
    'c5': Precision('fp8', 'fp8', 'fp8', 'fp16', amax_history=1),
}
"""By name; C1 to C5 are those of the paper's Table 7.

Upstream has weights in fp8 beside narrow masters with delayed scaling only.
"""


@dataclass(frozen=True)
class Batch:
    """What one iteration trains on."""

    sequence_length: int = 4096
    micro_batch_size: int = 1
    """Sequences."""
    global_batch_size: int = 512
    """Sequences of one iteration."""

    def __post_init__(self) -> None:
        fields.check(self, whole='sequence_length micro_batch_size global_batch_size')

    @property
    def tokens(self) -> int:
        """Tokens of one iteration."""
        return self.sequence_length * self.global_batch_size

    def micro_batches(self, data: int) -> int:
        """Micro-batches of one iteration on each of `data` data-parallel ranks.

        Raises:
            FieldError: they do not come out even.
        """
        at_once = self.micro_batch_size * data
        rule = f'give a multiple of micro_batch_size x data parallelism = {at_once}'
        good = self.global_batch_size % at_once == 0
        fields.require(good, 'global_batch_size', self.global_batch_size, rule)
        return self.global_batch_size // at_once


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups.

    Raises:
        FieldError: a field breaks its rule.
    """

    ranks: int
    """GPUs of the job."""
    pipeline: int = 1
    expert: int = 1
    tensor: int = 1
    context: int = 1
    expert_tensor: int | None = None
    """Tensor parallelism inside of an expert; None: as `tensor`."""
    chunks: int = 1
    """Model chunks (virtual stages) per pipeline rank."""
    layers_per_stage: tuple[int, ...] | None = None
    """None: as equal as possible, the first and last stage (which also hold embedding and head)
    take no more than any other."""
    distributed_optimizer: bool = True
    """Masters and moments are sharded over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced in buckets, of which each rank owns a shard."""
    sequence_parallel: bool = False
    """Activations between stages are sharded over the tensor-parallel ranks."""

    def __post_init__(self) -> None:
        fields.check(self, whole='ranks pipeline expert tensor context chunks expert_tensor')
        unit = self.tensor * self.context * self.pipeline
        rule = f'give a multiple of tensor x context x pipeline = {unit}'
        fields.require(self.ranks % unit == 0, 'ranks', self.ranks, rule)
        unit = self.expert * self.tensor_of_experts
        rule = (
            f'expert x expert_tensor = {unit} must divide the {self.stage_ranks} ranks of a stage'
        )
        fields.require(self.stage_ranks % unit == 0, 'expert', self.expert, rule)
        if self.layers_per_stage is not None:
            good = len(self.layers_per_stage) == self.pipeline and min(self.layers_per_stage) >= 0
            rule = f'give 0 or more layers for each of the {self.pipeline} stages'
            fields.require(good, 'layers_per_stage', self.layers_per_stage, rule)
            rule = 'with layers_per_stage give 1: chunks are of one size'
            fields.require(self.chunks == 1, 'chunks', self.chunks, rule)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage, all of which roll back together."""
        return self.ranks // self.pipeline

    @property
    def data(self) -> int:
        """Data-parallel ranks, as Megatron counts them (context parallelism apart)."""
        return self.stage_ranks // (self.tensor * self.context)

    @property
    def tensor_of_experts(self) -> int:
        """Ranks over which one expert is split."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that compute with the same part of the same experts."""
        return self.stage_ranks // (self.expert * self.tensor_of_experts)

    def family_of(self, rank: int) -> int:
        """Lowest of the ranks that capture the same as a global rank, itself if there is none.

        Those of a data-parallel group without the distributed optimizer, with the same experts.
        """
        apart = self.expert * self.tensor_of_experts
        if self.distributed_optimizer or apart % self.tensor:
            return rank
        first = rank - rank % self.stage_ranks
        return first + (rank - first) % apart

    def stage_of(self, rank: int) -> int:
        """Pipeline stage of a global rank."""
        return rank // self.stage_ranks

    def layers_of(self, stage: int, layers: int) -> list[list[int]]:
        """Numbers (from 1) of the layers of each chunk of `stage`, for a model of `layers`.

        Raises:
            FieldError: the layers cannot be spread as described.
        """
        if self.chunks > 1:
            slots = self.pipeline * self.chunks
            rule = f'must divide the {layers} layers of the model together with pipeline'
            fields.require(layers % slots == 0, 'chunks', self.chunks, rule)
            size = layers // slots
            firsts = (1 + size * (chunk * self.pipeline + stage) for chunk in range(self.chunks))
            return [list(range(first, first + size)) for first in firsts]
        counts = self.layers_per_stage or spread(layers, self.pipeline)
        rule = f'must add up to the {layers} layers of the model'
        fields.require(sum(counts) == layers, 'layers_per_stage', counts, rule)
        rule = f'stages between the first and the last need a layer each, of {layers}'
        fields.require(0 not in counts[1:-1], 'pipeline', self.pipeline, rule)
        first = 1 + sum(counts[:stage])
        return [list(range(first, first + counts[stage]))]


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as possible; what is left over goes to the middle."""
    least, left = divmod(layers, stages)
    first = (stages - left) // 2
    return tuple(least + (first <= stage < first + left) for stage in range(stages))
