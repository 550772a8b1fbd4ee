# SPDX-License-Identifier: Apache-2.0
"""What the upstream log keeps, how it is asked for, and why it may have to decline."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.window.name import Count


class Direction(StrEnum):
    """Where the logging stage sent a tensor."""

    DOWN = 'down'
    """Activations, to the next stage."""
    UP = 'up'
    """Gradients, to the previous stage."""


class LogKey(NamedTuple):
    """Name of one tensor that was sent.

    `sequence` counts, from 0, the tensors sent in this direction within the iteration. Sender and
    receiver follow one schedule and tensors arrive in the order in which they were sent, so the
    sequence alone identifies micro-batch and virtual chunk.
    """

    iteration: int
    """Iteration in which it was sent."""
    direction: Direction
    sequence: int

    def __str__(self) -> str:
        """Words for messages."""
        return f'tensor {self.sequence} sent {self.direction} in iteration {self.iteration}'


class LoggedTensor(msgspec.Struct, frozen=True, array_like=True):
    """Type, shape and checksum by which the bytes of a record are a tensor again."""

    dtype: str
    """`bfloat16`, `float32`, `int64`, ..."""
    shape: tuple[Count, ...]
    nbytes: Count
    """Size in bytes."""
    checksum: Count
    """xxh3_64 of the bytes."""


class LogGap(SparseCheckpointError):
    """The record is not in the log and will not come; recovery has to take another way."""


class CorruptLog(SparseCheckpointError):
    """A record that arrived is not what was logged; the message names it."""
