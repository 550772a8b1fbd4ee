# SPDX-License-Identifier: Apache-2.0
"""What adapters share: states of random number generators, and transfers of large states."""

import random
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import torch

from moevement_ext.memory.tensors import copy_all, in_batches


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


PACKED_BYTES = 256 * 2**20
"""Bytes sent at once, which is also the size of the buffer on a device with little memory."""


@torch.no_grad()
def broadcast_packed(
    tensors: Iterable[torch.Tensor],
    source: int,
    group: torch.distributed.ProcessGroup,
    device: torch.device,
    limit: int = PACKED_BYTES,
) -> None:
    """Copy the values of global rank `source` to all ranks of `group`. Collective; training thread.

    Args:
        tensors: contiguous, of the same types and sizes in the same order on all ranks; some may
            be on the CPU, as the step counts of torch's Adam are.
        source: global rank.
        group: the group of ranks.
        device: the device that the backend of `group` sends from.
        limit: bytes to send at once.
    """
    for batch in _batches(tensors, limit):
        packed = torch.cat([part.to(device) for part in batch])
        torch.distributed.broadcast(packed, source, group=group)
        copy_all(batch, packed.split([part.numel() for part in batch]))


@torch.no_grad()
def send_packed(
    tensors: Iterable[torch.Tensor],
    target: int,
    group: torch.distributed.ProcessGroup,
    device: torch.device,
) -> None:
    """Send values to global rank `target`, which calls `receive_packed`; see `broadcast_packed`."""
    for batch in _batches(tensors, PACKED_BYTES):
        packed = torch.cat([part.to(device) for part in batch])
        torch.distributed.send(packed, target, group=group)


@torch.no_grad()
def receive_packed(
    tensors: Iterable[torch.Tensor],
    source: int,
    group: torch.distributed.ProcessGroup,
    device: torch.device,
) -> None:
    """Receive values from global rank `source` in place; see `send_packed`."""
    for batch in _batches(tensors, PACKED_BYTES):
        sizes = [part.numel() for part in batch]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        torch.distributed.recv(packed, source, group=group)
        copy_all(batch, packed.split(sizes))


def _batches(tensors: Iterable[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    flat = (tensor.detach().view(-1).view(torch.uint8) for tensor in tensors)
    parts = (part for one in flat for part in one.split(limit))
    return in_batches(parts, torch.Tensor.numel, limit)
