# SPDX-License-Identifier: Apache-2.0
"""Broadcasts a large part of the training state on a device with little free memory."""

from collections.abc import Iterable

import torch

from moevement_ext.memory.batches import copy_all, in_batches

PACKED_BYTES = 256 * 2**20
"""Bytes sent at once, which is also the size of the buffer on the device."""


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
    parts = (part for tensor in tensors for part in _bytes_of(tensor).split(limit))
    for batch in in_batches(parts, torch.Tensor.numel, limit):
        packed = torch.cat([part.to(device) for part in batch])
        torch.distributed.broadcast(packed, source, group=group)
        copy_all(batch, packed.split([part.numel() for part in batch]))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
