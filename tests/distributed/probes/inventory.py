# SPDX-License-Identifier: Apache-2.0
"""Writes down what a worker holds: model and optimizer as upstream has them, operators as we do."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from megatron.moevement.state.optimizer_state import chained
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.plan.replanning import PlanParameters
from moevement_ext.protect.planner import Planner
from tests.distributed.probes import training as probes

Range = tuple[int, int]


def write_inventory() -> None:
    """Write down everything after set-up, and leave."""
    probes.after_set_up(
        lambda session, training: probes.report('inventory', _look(session, training))
    )


def _look(session: Any, training: TrainingState) -> dict[str, Any]:
    planner: Planner = session.job.planner
    plan = planner.first_plan(PlanParameters(window=3))
    return {
        'place': {
            'stage': parallel_state.get_pipeline_model_parallel_rank(),
            'tensor': parallel_state.get_tensor_model_parallel_rank(),
            'expert': parallel_state.get_expert_model_parallel_rank(),
            'expert-tensor': parallel_state.get_expert_tensor_parallel_rank(),
        },
        'layers': [layer.layer_number for chunk in _chunks(training) for layer in _layers(chunk)],
        'parameters': dict(_members(training, 'named_parameters')),
        'buffers': dict(_members(training, 'named_buffers')),
        'operators': {
            name: [item.kind, list(item.parameters), list(item.buffers)]
            for name, item in training.operators.items()
        },
        'same': all(
            dict(_objects(training))[name] is tensor
            for item in training.operators.values()
            for name, tensor in [*item.parameters.items(), *item.buffers.items()]
        ),
        'captured': [
            [part.operator, part.tensor, part.part, part.start, part.end]
            for item in training.slices.values()
            for part in item.full
        ],
        'weights': [
            [part.tensor, part.part, part.start, part.end]
            for item in training.slices.values()
            for part in item.weights
        ],
        'state': list(_coverage(training)),
        'tied': training.tied,
        'plan': plan.digest,
        'slots': plan.plan.slots,
    }


def _chunks(training: TrainingState) -> list[torch.nn.Module]:
    return unwrap_model(training.model)


def _layers(chunk: Any) -> list[Any]:
    return list(chunk.decoder.layers)


def _members(training: TrainingState, kind: str) -> Iterator[tuple[str, int]]:
    """Names and numbers of elements of upstream's own tensors."""
    for index, chunk in enumerate(_chunks(training)):
        for name, tensor in getattr(chunk, kind)():
            yield f'chunk{index}.{name}', tensor.numel()


def _objects(training: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    for index, chunk in enumerate(_chunks(training)):
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            yield f'chunk{index}.{name}', tensor


def _coverage(training: TrainingState) -> Iterator[tuple[str, int, list[Range]]]:
    """Each tensor of the optimizer with its bytes and the byte ranges of it that are captured."""
    parts = sorted(
        (part.source.data_ptr(), part.nbytes)
        for item in training.slices.values()
        for part in item.full
        if part.part != 'buffer'
    )
    for name, tensor in _optimizer_tensors(training.optimizer):
        first, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        inside = [(p - first, p - first + n) for p, n in parts if first <= p < first + size]
        yield name, size, inside


def _optimizer_tensors(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Masters, moments and step counts, by a name that is the same on all replicas."""
    for number, inner in enumerate(chained(optimizer)):
        for index, group in enumerate(inner.optimizer.param_groups):
            for order, main in enumerate(group['params']):
                place = f'{number}/{index}/{order}'
                yield f'{place}/master', main
                for key, value in inner.optimizer.state[main].items():
                    if torch.is_tensor(value):
                        yield f'{place}/{key}', value
