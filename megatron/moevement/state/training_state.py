# SPDX-License-Identifier: Apache-2.0
"""Model, optimizer and scheduler of this rank, from the view of sparse checkpointing."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.moevement.facts import Chunks, Counters, MegatronOptimizer, OptimizerParamScheduler
from megatron.moevement.seams import patches
from megatron.moevement.state import iteration_state, low_precision
from megatron.moevement.state.dp_copy import copy_state
from megatron.moevement.state.frozen import FrozenOperators
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.model_operators import (
    Operator,
    check_complete,
    operator_inventory,
    router_modules,
    tied_operators,
)
from megatron.moevement.state.optimizer_state import (
    ParameterState,
    chained,
    complete_restore,
    parameter_states,
)
from moevement_ext import faults
from moevement_ext.capture.layout import OperatorSlices, TensorSlice, check_fits
from moevement_ext.faults import Phase
from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.tensors import dtype_of
from moevement_ext.memory.window.slot import Record, SlotContext, SlotHeader


@dataclass(eq=False)
class TrainingState:
    """The training state of this rank: a `moevement_ext.capture.layout.Operators`.

    Args:
        skips: weight gradients of frozen operators are not computed; else they are dropped.

    Raises:
        SparseCheckpointError: the type of optimizer or model is unknown.
    """

    model: Chunks
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    _skips: bool = True

    def __post_init__(self) -> None:
        for _, router in router_modules(self.model):
            router._maintain_float32_expert_bias()  # upstream does this in the first forward pass
        low_precision.create_scaling(self.model)
        self.operators = operator_inventory(self.model)
        self.tied = tied_operators(self.model, self.operators)
        self.device = next(self.model[0].parameters()).device
        self.states, self.slices, self.frozen = self._taken_apart()

    def renew(self) -> None:
        self.states, self.slices, self.frozen = self._taken_apart()

    def _taken_apart(
        self,
    ) -> tuple[
        dict[torch.nn.Parameter, ParameterState], dict[str, OperatorSlices], FrozenOperators
    ]:
        """The optimizer's state by parameter; the slices of operators; and what freezes them."""
        names = {
            parameter: name
            for operator in self.operators.values()
            for name, parameter in operator.parameters.items()
        }
        states = parameter_states(self.optimizer, names)
        check_complete(self.operators, states)
        slices = operator_slices(self.operators, states)
        frozen = FrozenOperators(self.operators, states, self.model, self.optimizer, self._skips)
        return states, slices, frozen

    @property
    def kinds(self) -> dict[str, str]:
        return {name: operator.kind for name, operator in self.operators.items()}

    def check(self, header: SlotHeader) -> None:
        check_fits(header, self.slices)

    @torch.no_grad()
    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        self.check(header)

        def read(record: Record) -> torch.Tensor:
            content = torch.from_numpy(payload[record.offset : record.offset + record.nbytes])
            dtype = dtype_of(record.dtype)
            assert dtype is not None  # `check` has compared the slot with the model
            return content.view(dtype)

        restore_slices(header.records, read, self.slices)
        self.complete_restore([*context.full, *context.weights], frozen=context.weights)

    def complete_restore(self, restored: Collection[str], frozen: Collection[str] = ()) -> None:
        """Complete the restored operators; see `optimizer_state.complete_restore`. Collective."""
        complete_restore(
            self.states_of(restored),
            self.model,
            frozen=frozenset(state.name for state in self.states_of(frozen)),
            distributed=any(
                isinstance(one, DistributedOptimizer) for one in chained(self.optimizer)
            ),
        )

    def states_of(self, names: Collection[str]) -> list[ParameterState]:
        """Optimizer state of the named operators that this rank has."""
        return [
            self.states[parameter]
            for name in names
            if name in self.operators
            for parameter in self.operators[name].parameters.values()
            if parameter in self.states
        ]

    def freeze(self, names: Collection[str]) -> None:
        self.frozen.freeze(names)

    def copy(self, source: int) -> None:
        copy_state(self.operators, self.states, source)

    def around_update(
        self,
        wait: Callable[[], None],
        writing: Callable[[], None],
        written: Callable[[bool], None],
    ) -> None:
        """Wrap the optimizer step; see `moevement_ext.recover.trainer.Trainer.around_update`."""

        def waiting_step(step: Callable[..., tuple[bool, object, object]]) -> object:
            faults.point(Phase.OPTIMIZER)
            wait()
            result = step()
            written(not result[0])
            faults.point(Phase.AFTER_STEP)
            return result

        def announced_step(step: Callable[[], bool]) -> bool:
            faults.point(Phase.NORM)
            writing()
            result = step()
            faults.point(Phase.STEP)  # after the first of several optimizers
            return result

        patches.wrap_object(self.optimizer, 'step', waiting_step)
        for inner in chained(self.optimizer):
            patches.wrap_object(inner, 'step_with_ready_grads', announced_step)

    def restore(self, state: IterationState, counters: Counters) -> None:
        iteration_state.restore(state, counters, self.optimizer, self.scheduler)

    def gather_parameters(self) -> None:
        """Gather parameters from their shards, which a failure may have prevented. Collective.

        Also without overlap: an aborted NCCL wait returns as if the collective had succeeded.
        """
        for chunk in self.model:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)


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
        scale = low_precision.weight_scale(parameter)
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


def restore_slices(
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
