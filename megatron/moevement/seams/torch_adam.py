# SPDX-License-Identifier: Apache-2.0
"""Repairs the loading of dense checkpoints in upstream's distributed optimizer.

In fp32 it copies into views of the weights themselves, which torch refuses outside of `no_grad`.

Torch's own Adam, which upstream uses without Transformer Engine and Apex, keeps a step for each
parameter. Upstream describes no steps of parameters that had no gradient yet, and loads one tensor
for all parameters: each parameter's update would then advance the step of all others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement.built import MegatronOptimizer
from megatron.moevement.seams import patches

_DISTRIBUTED_OPTIMIZER = 'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer'


@functools.cache
def patch() -> None:
    """Make dense checkpoints load on any device. Call after megatron imports.

    With Transformer Engine or Apex steps are left alone: their Adam keeps one step per group.
    """
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    set_states = f'{_DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states'
    patches.wrap(set_states, torch.no_grad()(lambda original, *args: original(*args)))
    if not HAVE_APEX_OR_TE:
        patches.wrap(f'{_DISTRIBUTED_OPTIMIZER}.sharded_state_dict', _describe_allocated)
        patches.wrap(f'{_DISTRIBUTED_OPTIMIZER}.load_state_dict', _load_with_own_steps)
        patches.wrap(set_states, _set_without_step)


def _describe_allocated(
    describe: Callable[..., object], optimizer: MegatronOptimizer, *args: object, **kwargs: object
) -> object:
    if isinstance(optimizer.optimizer, torch.optim.Adam):
        for group in optimizer.optimizer.param_groups:
            for parameter in group['params']:
                _ensure_adam_state(optimizer.optimizer.state[parameter], parameter)
    return describe(optimizer, *args, **kwargs)


def _load_with_own_steps(
    load: Callable[..., object], optimizer: MegatronOptimizer, state_dict: dict[str, Any]
) -> None:
    load(optimizer, state_dict)
    if isinstance(optimizer.optimizer, torch.optim.Adam):
        step = float(state_dict['optimizer']['param_groups'][0]['step'])
        for state in optimizer.optimizer.state.values():
            state['step'] = torch.tensor(step)


def _set_without_step(
    set_states: Callable[..., None],
    optimizer: MegatronOptimizer,
    parameter: torch.nn.Parameter,
    tensors: dict[str, object],
) -> None:
    """Pass a step of None, which upstream does not set: reshardable checkpoints have no steps."""
    set_states(optimizer, parameter, {'step': None, **tensors})


def _ensure_adam_state(state: dict[str, torch.Tensor], parameter: torch.Tensor) -> None:
    if not state:
        state['step'] = torch.tensor(0.0)
        state['exp_avg'] = torch.zeros_like(parameter.data)
        state['exp_avg_sq'] = torch.zeros_like(parameter.data)
