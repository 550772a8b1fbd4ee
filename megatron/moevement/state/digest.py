# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests of the whole training state, to compare two runs bit for bit."""

from collections.abc import Iterator

import torch

from megatron.moevement.facts import Chunks, Counters, MegatronOptimizer, OptimizerParamScheduler
from megatron.moevement.state import iteration_state, low_precision
from megatron.moevement.state.model_operators import Operator, operator_inventory
from megatron.moevement.state.optimizer_state import (
    chained,
    counts_steps_per_parameter,
    parameter_states,
)
from megatron.moevement.state.resharded_tensors import canonical_name
from moevement_ext.job.digest_file import digest_of_bytes, digest_of_tensor


def state_digest(
    model: Chunks,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    counters: Counters,
) -> dict[str, str]:
    """Digest of every tensor and of the auxiliary state of this rank, by name."""
    entries = dict(_tensors(model, optimizer))
    rng = iteration_state.capture_rng()
    entries |= {
        'rng/python': digest_of_bytes(repr(rng.python).encode()),
        'rng/numpy': digest_of_bytes(repr(rng.numpy).encode()),
        'rng/torch': digest_of_bytes(rng.torch),
        'rng/cuda': digest_of_bytes(rng.cuda),
        **{f'rng/{name}': digest_of_bytes(state) for name, state in rng.tracker.items()},
        'scheduler/num_steps': digest_of_bytes(repr(scheduler.num_steps).encode()),
        'consumed_train_samples': digest_of_bytes(repr(counters.consumed_train_samples).encode()),
        'skipped_train_samples': digest_of_bytes(repr(counters.skipped_train_samples).encode()),
    }
    for index, scaler in enumerate(iteration_state.scaler_states(optimizer)):
        entries[f'loss_scale/{index}'] = digest_of_bytes(repr(scaler).encode())
    # A `step` of a group is then a remnant of a dense checkpoint.
    per_parameter = all(counts_steps_per_parameter(one.optimizer) for one in chained(optimizer))
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: group.get(key) for key in ('lr', 'weight_decay')}
        if not per_parameter:
            settings['step'] = group.get('step')
        entries[f'group/{index}'] = digest_of_bytes(repr(settings).encode())
    return entries


def _tensors(model: Chunks, optimizer: MegatronOptimizer) -> Iterator[tuple[str, str]]:
    names = {}
    for operator in operator_inventory(model).values():
        for tensor, parameter in operator.parameters.items():
            names[parameter] = name = _named(operator, tensor)
            yield f'parameter/{name}', digest_of_tensor(low_precision.raw(parameter))
            weight_scale = low_precision.weight_scale(parameter)
            if weight_scale is not None:
                yield f'weight_scale/{name}', digest_of_tensor(weight_scale)
        for name, buffer in operator.buffers.items():
            yield f'buffer/{name}', digest_of_tensor(buffer)
        for name, state in operator.scaling.items():
            yield f'scaling/{name}', digest_of_tensor(state)
    for held in parameter_states(optimizer, names).values():
        yield f'master/{held.name}', digest_of_tensor(low_precision.raw(held.main))
        for key, value in sorted(held.inner.state[held.main].items()):
            if torch.is_tensor(value):
                yield f'{key}/{held.name}', digest_of_tensor(low_precision.raw(value))
        for key, scale in held.scales().items():
            yield f'{key}/{held.name}', digest_of_tensor(scale)


def _named(operator: Operator, tensor: str) -> str:
    """Name of a tensor of this rank; where experts have slots, with the number of the expert."""
    return canonical_name(operator.holds, tensor, False) if operator.holds else tensor
