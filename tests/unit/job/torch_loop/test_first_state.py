# SPDX-License-Identifier: Apache-2.0
"""Optimizer state created before the first step does not change training."""

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from moevement_ext.config import ConfigurationError
from moevement_ext.job.torch_loop.module_operators import create_state

OPTIMIZERS = [
    lambda given: optim.Adam(given, amsgrad=True),
    lambda given: optim.AdamW(given, weight_decay=0.5, fused=True),
    lambda given: optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    lambda given: optim.SGD(given, lr=0.1),
    lambda given: optim.RMSprop(given, momentum=0.5, centered=True),
    lambda given: optim.Adagrad(given, initial_accumulator_value=0.3),
    lambda given: optim.Adadelta(given),
    lambda given: optim.Adamax(given),
]


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Linear(3, 2)


def train(module: nn.Module, optimizer: optim.Optimizer) -> list[torch.Tensor]:
    for step in range(3):
        optimizer.zero_grad()
        module(torch.full((1, 3), step + 1.0)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize('make', OPTIMIZERS)
def test_created_state_trains_with_the_bits_of_lazy_state(
    make: Callable[..., optim.Optimizer],
) -> None:
    plain, prepared = model(), model()
    optimizer = make(prepared.parameters())
    create_state(optimizer)
    expected = train(plain, make(plain.parameters()))
    for one, other in zip(expected, train(prepared, optimizer), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_a_warm_up_do_not_reach_the_state() -> None:
    module = model()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = optim.Adam(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    create_state(optimizer)
    assert all(map(torch.equal, before, module.parameters()))
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())


def test_existing_state_is_kept() -> None:
    module = model()
    optimizer = optim.Adam(module.parameters())
    train(module, optimizer)
    create_state(optimizer)
    assert all(float(state['step']) == 3.0 for state in optimizer.state.values())


@pytest.mark.parametrize(
    'make',
    [
        lambda given: optim.NAdam(given),
        lambda given: optim.SGD(given, lr=0.1, momentum=0.9, dampening=0.1),
    ],
)
def test_optimizer_with_unknown_initial_state_is_refused(
    make: Callable[..., optim.Optimizer],
) -> None:
    with pytest.raises(ConfigurationError, match='what it begins with is not known.* Adam,'):
        create_state(make(model().parameters()))
