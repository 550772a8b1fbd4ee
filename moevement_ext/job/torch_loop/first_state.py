# SPDX-License-Identifier: Apache-2.0
"""Creates optimizer state before the first step, so that captures have tensors to copy."""

import torch
from torch import optim

from moevement_ext.config import ConfigurationError

# Optimizers whose state is all zeros before the first step.
_BEGIN_AT_ZERO = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW),
    *(optim.RMSprop, optim.SGD),
)


def create_state(optimizer: optim.Optimizer) -> None:
    """Create the state that the first step would create, with its initial values.

    Existing state and parameters do not change; gradients are dropped. Raises
    `ConfigurationError` if the initial state of this optimizer is not known to be zero.
    """
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        for parameter in group['params']:
            if not optimizer.state.get(parameter):
                _check(optimizer, group.get('dampening', 0))
                _step_once(optimizer, parameter)


def _check(optimizer: optim.Optimizer, dampening: float) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, _BEGIN_AT_ZERO) or dampening:
        with_it = ' with dampening' if dampening else ''
        raise ConfigurationError(
            f'{name}{with_it} has no state for some parameters yet, and what it begins with is not '
            'known: fill optimizer.state before the trainer is built, or take one of '
            f'{", ".join(kind.__name__ for kind in _BEGIN_AT_ZERO)} (SGD without dampening).'
        )


@torch.no_grad()
def _step_once(optimizer: optim.Optimizer, parameter: torch.Tensor) -> None:
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parameter.grad = None
    parameter.copy_(before)
    for value in optimizer.state.get(parameter, {}).values():
        if torch.is_tensor(value):
            value.zero_()
