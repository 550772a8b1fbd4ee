# SPDX-License-Identifier: Apache-2.0
"""State of Megatron at the start of an iteration, except tensors, as bytes."""

from megatron.moevement.counters import Counters
from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.state import iteration_state
from megatron.moevement.state.global_scalars import GlobalScalars, ScalarRecorder
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.operation_count import OperationCount
from megatron.moevement.state.training_state import TrainingState

_SPARE_BYTES = 4096


class MegatronAuxiliaryState:
    """All state except tensors: a `trainer.AuxiliaryState`. Training thread only.

    Args:
        training: model, optimizer and scheduler.
        counters: counters of the loop.
        recorder: records the scalars that all ranks reduce together.
        data: moves the data of this rank.
        operations: counts floating point operations.
    """

    def __init__(
        self,
        training: TrainingState,
        counters: Counters,
        recorder: ScalarRecorder,
        data: DataPosition,
        operations: OperationCount,
    ) -> None:
        self._training = training
        self._counters = counters
        self._recorder = recorder
        self._data = data
        self._operations = operations

    @property
    def max_bytes(self) -> int:
        """Upper bound of the encoded size; generator states have a fixed size."""
        longest = self.capture(0, GlobalScalars([0.1] * 64, [False] * 64))
        return len(iteration_state.encode(longest)) + _SPARE_BYTES

    def now(self) -> bytes:
        """The present state, encoded; leaves the recorder unchanged."""
        return iteration_state.encode(self.capture(self._counters.iteration, self._recorder.peek()))

    def begin(self, iteration: int) -> bytes:
        """State at the start of the iteration after `iteration`; resets the recorder."""
        return iteration_state.encode(self.capture(iteration, self._recorder.take()))

    def capture(self, iteration: int, scalars: GlobalScalars) -> IterationState:
        """State after `iteration` iterations, the last of which reduced `scalars`."""
        return iteration_state.capture(
            self._counters,
            iteration,
            self._training.optimizer,
            self._training.scheduler,
            scalars,
            self._operations.at(self._counters.consumed_train_samples),
        )

    def restore(self, state: bytes) -> None:
        """Put the process at the start of the iteration after `state`."""
        decoded = iteration_state.decode(state)
        self._training.restore(decoded, self._counters)
        self._recorder.roll_back(decoded.scalars)

    def move_data(self, state: bytes) -> None:
        """Move the training data to the position in `state`."""
        self._data.move_training(iteration_state.decode(state).consumed_train_samples)

    def set_counters(self, state: bytes, validation: bytes | None = None) -> None:
        """Set iteration and samples of upstream's arguments from `state`."""
        iteration_state.restore_counters(iteration_state.decode(state), self._counters)
        if validation is not None:
            last = iteration_state.decode(validation)
            self._counters.consumed_valid_samples = last.consumed_valid_samples

    def count(self, iteration: int, samples: int | None, validation: int | None = None) -> None:
        """Set the numbers of iterations and samples; None keeps upstream's number of samples."""
        if validation is not None:
            self._counters.consumed_valid_samples = validation
        known = self._counters.consumed_train_samples if samples is None else samples
        iteration_state.move_to(iteration, known, self._counters)
