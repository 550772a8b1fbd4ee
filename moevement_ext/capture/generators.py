# SPDX-License-Identifier: Apache-2.0
"""States of the random number generators of this process."""

import random

import msgspec
import numpy as np
import torch


class GeneratorStates(msgspec.Struct):
    """States of all generators that torch, numpy and Python have by default."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, bytes, int, int, float]
    torch: bytes
    cuda: bytes
    """The generator of the current device; empty without one."""


def capture_generators(on_device: bool) -> GeneratorStates:
    """States of the default generators; `on_device` includes that of the current CUDA device."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return GeneratorStates(
        python=(version, internal, gauss),
        numpy=(name, keys.tobytes(), position, has_gauss, cached),
        torch=state_bytes(torch.get_rng_state()),
        cuda=state_bytes(torch.cuda.get_rng_state()) if on_device else b'',
    )


def restore_generators(state: GeneratorStates) -> None:
    version, internal, gauss = state.python
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state.numpy
    np.random.set_state((name, np.frombuffer(keys, np.uint32), position, has_gauss, cached))
    if state.cuda:
        torch.cuda.set_rng_state(state_tensor(state.cuda))
    torch.set_rng_state(state_tensor(state.torch))  # last: it may be the same generator


def state_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def state_tensor(state: bytes) -> torch.Tensor:
    """Inverse of `state_bytes`: uint8, [bytes]."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
