# SPDX-License-Identifier: Apache-2.0
"""What wraps a training loop, whosever it is."""

from dataclasses import dataclass

from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.losses import Losses
from megatron.moevement.seams.post_step import PostStep
from megatron.moevement.state.global_scalars import ScalarRecorder
from megatron.moevement.state.operation_count import OperationCount


@dataclass(frozen=True)
class Surroundings:
    """What wraps a loop of either kind; made before the model is."""

    recorder: ScalarRecorder
    """Records the scalars that all ranks reduce together."""
    data: DataPosition
    """Where the data of this rank go on."""
    post_step: PostStep
    """What the loop does after an iteration."""
    operations: OperationCount
    """Floating point operations so far, for upstream's own count."""
    losses: Losses
    """The loss of each iteration on this rank."""
