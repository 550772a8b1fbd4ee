# SPDX-License-Identifier: Apache-2.0
"""The parallel layout of the job that captured a window, and the owner's place in it, as numbers.

A job in another layout can load a window with these numbers: operators have the same names on all
ranks of all jobs, ranges of tensors refer to the whole (tensor-parallel) shard, and the place tells
which tensor-parallel shard it is.
"""

from typing import Annotated

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1)]
Index = Annotated[int, msgspec.Meta(ge=0)]


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of the parallel groups of a job."""

    ranks: Size
    tensor: Size = 1
    context: Size = 1
    pipeline: Size = 1
    chunks: Size = 1
    """Model chunks of a rank: more than 1 with interleaved stages."""
    data: Size = 1
    """Data-parallel ranks, without context parallelism."""
    expert: Size = 1
    expert_tensor: Size = 1
    instances: Size = 1
    """Instances of the sharded optimizer."""
    sharded: bool = False
    """The optimizer state is sharded over the data-parallel ranks."""
    stages: str = ''
    """How layers are divided among stages, if not evenly."""

    def __str__(self) -> str:
        sizes = {
            'TP': self.tensor,
            'CP': self.context,
            'PP': self.pipeline,
            'VPP': self.chunks,
            'DP': self.data,
            'EP': self.expert,
            'ETP': self.expert_tensor,
            'optimizer instances': self.instances,
        }
        told = [f'{name} {size}' for name, size in sizes.items() if size > 1]
        told += ['sharded optimizer'] if self.sharded else []
        told += [self.stages] if self.stages else []
        count = f'{self.ranks} rank{"s" if self.ranks > 1 else ""}'
        return count + (f' ({", ".join(told)})' if told else '')


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """Place of one rank: its index in each of its parallel groups."""

    tensor: Index = 0
    context: Index = 0
    pipeline: Index = 0
    data: Index = 0
    expert: Index = 0
    expert_tensor: Index = 0
    expert_data: Index = 0


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Stamp of a slot for readers in another layout."""

    training: str
    """Digest of all settings that must not change, whatever the layout."""
    layout: Layout
    seat: Seat


def of_same_training(one: Placed | None, other: Placed | None) -> bool:
    """True if both are stamped, with the same training."""
    return one is not None and other is not None and one.training == other.training
