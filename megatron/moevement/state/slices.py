# SPDX-License-Identifier: Apache-2.0
"""Operators as slices to capture, and back: from the slices of a slot to the training state."""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch

from megatron.moevement.built import Chunks
from megatron.moevement.state import stored
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState, complete_restore
from moevement_ext.capture.layout import OperatorSlices, TensorSlice, check_fits
from moevement_ext.memory.dtypes import dtype_of
from moevement_ext.memory.window.slot import Record, SlotContext, SlotHeader


def operator_slices(
    operators: Mapping[str, Operator], states: Mapping[torch.nn.Parameter, ParameterState]
) -> dict[str, OperatorSlices]:
    """The slices that this rank captures of each of its operators."""
    return {name: _slices(operator, states) for name, operator in operators.items()}


def _slices(
    operator: Operator, states: Mapping[torch.nn.Parameter, ParameterState]
) -> OperatorSlices:
    owned = [states[parameter] for parameter in operator.parameters.values() if parameter in states]
    buffers = [
        TensorSlice(operator.name, name, 'buffer', 0, buffer.numel(), _flat(buffer), volatile=True)
        for name, buffer in operator.buffers.items()
    ]
    full = [part for state in owned for part in _full(operator.name, state)]
    weights = [_slice(operator.name, state, 'weight', state.weight()) for state in owned]
    scaling = [
        TensorSlice(operator.name, name, 'scaling', 0, state.numel(), _flat(state), volatile=True)
        for name, state in operator.scaling.items()
    ]
    small = (*_weight_scales(operator), *buffers)
    return OperatorSlices((*full, *small), (*weights, *small), tuple(scaling))


def _weight_scales(operator: Operator) -> Iterator[TensorSlice]:
    """Scales of all fp8 weights, also of weights that this rank has no shard of."""
    for name, parameter in operator.parameters.items():
        scale = stored.weight_scale(parameter)
        if scale is not None:
            yield TensorSlice(operator.name, name, 'weight_scale', 0, scale.numel(), _flat(scale))


def _full(operator: str, state: ParameterState) -> list[TensorSlice]:
    main = 'weight' if state.updates_weight() else 'master'
    parts = [_slice(operator, state, main, state.master())]
    if state.weight_has_scale() and not state.updates_weight():
        parts.append(_slice(operator, state, 'weight', state.weight()))
    parts += [_slice(operator, state, key, value) for key, value in state.elements().items()]
    parts += [
        TensorSlice(operator, state.name, key, 0, 1, value) for key, value in state.scales().items()
    ]
    step = state.step()
    if step is not None:
        parts.append(TensorSlice(operator, state.name, 'step', 0, 1, _flat(step)))
    return parts


def _slice(operator: str, state: ParameterState, part: str, source: torch.Tensor) -> TensorSlice:
    return TensorSlice(operator, state.name, part, state.start, state.end, source)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


class SlotLoader:
    """Loads slots into the training state of this rank. Training thread only.

    Args:
        operators: inventory of this rank.
        slices: the captured slices of the operators.
        states: optimizer state by parameter.
        model: model chunks of this rank.
        distributed: the optimizer is upstream's distributed one.
    """

    def __init__(
        self,
        operators: Mapping[str, Operator],
        slices: Mapping[str, OperatorSlices],
        states: Mapping[torch.nn.Parameter, ParameterState],
        model: Chunks,
        distributed: bool,
    ) -> None:
        self._operators = operators
        self._slices = slices
        self._states = {state.name: state for state in states.values()}
        self._model = model
        self._distributed = distributed
        self._buffers = {
            name: buffer for item in operators.values() for name, buffer in item.buffers.items()
        }
        self._weights = {
            name: weight for item in operators.values() for name, weight in item.parameters.items()
        }
        self._scaling = {
            name: state for item in operators.values() for name, state in item.scaling.items()
        }

    def check(self, header: SlotHeader) -> None:
        """Check that a slot has all records that this model needs.

        Raises:
            RefusedWindow: the slot belongs to another model; the message names a parameter.
        """
        check_fits(header, self._slices)

    @torch.no_grad()
    def load(self, header: SlotHeader, payload: np.ndarray, context: SlotContext) -> None:
        """Load one verified slot. Collective over the ranks of the stage.

        Raises:
            RefusedWindow: the slot belongs to another model.
        """
        self.check(header)
        for record in header.records:
            content = torch.from_numpy(payload[record.offset : record.offset + record.nbytes])
            dtype = dtype_of(record.dtype)
            assert dtype is not None  # `check` has compared the slot with the model
            self.restore(record, content.view(dtype))
        complete_restore(
            self._states_of([*context.full, *context.weights]),
            self._model,
            frozen=frozenset(state.name for state in self._states_of(context.weights)),
            distributed=self._distributed,
        )

    def restore(self, record: Record, content: torch.Tensor) -> None:
        """Copy one captured range back to its source."""
        if record.part == 'buffer':
            self.restore_buffer(record, content)
        elif record.part == 'step':
            self.restore_step(record, content)
        elif record.part == 'weight':
            self._states[record.tensor].weight().copy_(content)
        elif record.part == 'master':
            self._states[record.tensor].master().copy_(content)
        elif record.part == 'weight_scale':
            self.restore_weight_scale(record, content)
        elif record.part == 'scaling':
            self.restore_scaling(record, content)
        elif record.part.startswith('scale'):
            self.restore_scale(record, content)
        else:
            self.restore_elements(record, content)

    def restore_buffer(self, record: Record, content: torch.Tensor) -> None:
        """Copy router bias or token counters."""
        buffer = self._buffers[record.tensor]
        buffer.copy_(content.view(buffer.shape))

    def restore_weight_scale(self, record: Record, content: torch.Tensor) -> None:
        """Copy the scale of one fp8 weight."""
        scale = stored.weight_scale(self._weights[record.tensor])
        assert scale is not None  # the model equals the captured one
        scale.copy_(content.view(scale.shape))

    def restore_scaling(self, record: Record, content: torch.Tensor) -> None:
        """Copy scales or amax history of one module."""
        state = self._scaling[record.tensor]
        state.copy_(content.view(state.shape))

    def restore_step(self, record: Record, content: torch.Tensor) -> None:
        """Copy the step count of one parameter."""
        step = self._states[record.tensor].step()
        assert step is not None  # the optimizer equals the captured one
        step.copy_(content.view(step.shape))

    def restore_scale(self, record: Record, content: torch.Tensor) -> None:
        """Copy the scale of one elementwise optimizer state."""
        self._states[record.tensor].scales()[record.part].copy_(content)

    def restore_elements(self, record: Record, content: torch.Tensor) -> None:
        """Copy one elementwise optimizer state."""
        self._states[record.tensor].elements()[record.part].copy_(content)

    def _states_of(self, names: Collection[str]) -> list[ParameterState]:
        return [
            self._states[name]
            for operator in names
            if operator in self._operators
            for name in self._operators[operator].parameters
            if name in self._states
        ]
