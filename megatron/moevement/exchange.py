# SPDX-License-Identifier: Apache-2.0
"""Small collectives at start-up; fault-free iterations use none of them."""

import torch


def exchange(own: bytes) -> list[bytes]:
    """Give some bytes to all ranks; returns those of every rank, by rank. Collective."""
    everyone: list[bytes] = [b''] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def all_agree(own: bool) -> bool:
    """True if it is true on every rank. Collective."""
    return all(answer == b'1' for answer in exchange(b'1' if own else b'0'))
