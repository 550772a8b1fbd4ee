# SPDX-License-Identifier: Apache-2.0
"""The wrappers around a training loop, upstream's or a custom one."""

from dataclasses import dataclass

from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.losses import Losses
from megatron.moevement.seams.post_step import PostStep
from megatron.moevement.state.global_scalars import ScalarRecorder
from megatron.moevement.state.operation_count import OperationCount


@dataclass(frozen=True)
class Surroundings:
    """Wrappers around either kind of loop; created before the model."""

    recorder: ScalarRecorder
    """Records the scalars that all ranks reduce together."""
    data: DataPosition
    """Moves the data of this rank."""
    post_step: PostStep
    """Follows the steps after an iteration."""
    operations: OperationCount
    """Counts floating point operations, for upstream's own count."""
    losses: Losses
    """The loss of each iteration on this rank."""
