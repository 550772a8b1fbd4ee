# SPDX-License-Identifier: Apache-2.0
"""Operators as slices to capture, and to restore."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from megatron.moevement.state import stored
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState
from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.memory.window.slot import Record


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


def restore(
    records: Iterable[Record],
    read: Callable[[Record], torch.Tensor],
    slices: Mapping[str, OperatorSlices],
) -> None:
    """Copy captured ranges, which `check_fits` has compared with `slices`, back to their sources.

    `read` returns the flat content of a record, in its data type.
    """
    sources = {
        (item.tensor, item.part): item.source
        for operator in slices.values()
        for item in (*operator.full, *operator.weights, *operator.always)
    }
    for record in records:
        sources[record.tensor, record.part].copy_(read(record))
