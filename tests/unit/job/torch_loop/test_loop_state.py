# SPDX-License-Identifier: Apache-2.0
"""Auxiliary state of a loop on plain torch."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from moevement_ext.config import ConfigurationError
from moevement_ext.job.torch_loop.loop_state import LoopState


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
