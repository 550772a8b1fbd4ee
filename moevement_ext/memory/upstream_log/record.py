# SPDX-License-Identifier: Apache-2.0
"""Records of the upstream log, their keys, and the errors of reading them."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.window.name import Count
from moevement_ext.memory.window.slot import ALIGNMENT, align_up


class Direction(StrEnum):
    """Direction in which the logging stage sent a tensor."""

    DOWN = 'down'
    """Activations, to the next stage."""
    UP = 'up'
    """Gradients, to the previous stage."""


class LogKey(NamedTuple):
    """Name of one tensor that was sent.

    `sequence` counts, from 0, the tensors sent in this direction within the iteration. Sender
    and receiver follow one schedule and tensors arrive in sending order, so it identifies
    micro-batch and virtual chunk.
    """

    iteration: int
    direction: Direction
    sequence: int

    def __str__(self) -> str:
        return f'tensor {self.sequence} sent {self.direction} in iteration {self.iteration}'


class LoggedTensor(msgspec.Struct, frozen=True, array_like=True):
    """Type, shape and checksum of a record, which turn its bytes into a tensor again."""

    dtype: str
    """`bfloat16`, `float32`, `int64`, ..."""
    shape: tuple[Count, ...]
    nbytes: Count
    checksum: Count
    """xxh3_64 of the bytes."""


class LogGap(SparseCheckpointError):
    """The record is not in the log and will not arrive; recovery must take another way."""


class CorruptLog(SparseCheckpointError):
    """A received record differs from the logged one; the message names the record."""


def region_bytes(nbytes: int) -> int:
    """Bytes that a record of `nbytes` takes in the ring."""
    return max(align_up(nbytes), ALIGNMENT)
