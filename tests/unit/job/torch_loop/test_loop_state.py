# SPDX-License-Identifier: Apache-2.0
"""State of a loop on plain torch: of its optimizer before the first step, and auxiliary state."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from moevement_ext.config import ConfigurationError
from moevement_ext.job.torch_loop.loop_state import LoopState
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


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def restored(given: Any) -> Any:
    loaded: list[Any] = []
    LoopState(lambda: None, loaded.append).restore(LoopState(lambda: given, print).now())
    return loaded[0]


@pytest.mark.parametrize('tensor', [torch.rand(2, 3).bfloat16(), torch.tensor(5), torch.ones(0)])
def test_tensors_are_restored_with_dtype_and_shape(tensor: torch.Tensor) -> None:
    found = restored({'tensor': tensor})['tensor']
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        (object(), 'holds a object: .* Give numbers'),
        (torch.zeros(1, dtype=torch.float8_e4m3fnuz), 'holds a Tensor: .* Give numbers'),
        (2**100, 'an integer of more than 64 bits'),
    ],
)
def test_unserializable_state_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LoopState(lambda: {'a': value}, print).now()


def test_restore_resets_all_random_generators() -> None:
    state = LoopState(lambda: None, lambda loaded: None)
    before = state.now()
    drawn = draw()
    state.restore(before)
    assert draw() == drawn


def test_draws_between_iterations_do_not_change_the_state() -> None:
    state = LoopState(lambda: None, lambda loaded: None)
    committed = state.committed()
    expected = draw()
    assert state.now() == committed
    assert state.begins() == committed
    assert draw() == expected


def test_reduced_numbers_are_part_of_the_state() -> None:
    state = LoopState(lambda: None, lambda loaded: None)
    state.iteration, state.reduced = 4, [0.1, 2.0]
    assert LoopState.reduced_in(state.now()) == [0.1, 2.0]
    other = LoopState(lambda: None, lambda loaded: None)
    other.set_counters(state.now())
    assert (other.iteration, other.reduced) == (4, [])
    other.restore(state.now())
    assert other.reduced == [0.1, 2.0]


def test_state_bytes_raises_the_size_bound() -> None:
    added = b''
    state = LoopState(lambda: added, print, state_bytes=10**6)
    bound = state.max_bytes
    added = bytes(10**6)
    assert len(state.committed()) <= bound


def test_state_that_outgrows_its_windows_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    added = b''
    state = LoopState(lambda: added, print)
    bound = state.max_bytes
    added = bytes(10**6)
    for _ in range(2):
        state.committed()
    [said] = caplog.messages
    assert 'TRAINING IS UNPROTECTED' in said and 'set state_bytes' in said
    assert f'room for {bound}.' in said
