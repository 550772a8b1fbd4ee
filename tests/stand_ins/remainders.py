# SPDX-License-Identifier: Apache-2.0
"""An fp32 master as a bf16 weight and 16 more bits, as Transformer Engine's Adam stores it.

The weight is the upper half of the master, one more where the lower half, read as int16, is
negative: so it is the master rounded, with halves away from zero.
"""

import torch


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its int16 remainder."""
    low = remainder.to(torch.int32)
    high = weight.detach().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 weight and the int16 remainder of an fp32 master."""
    bits = master.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low
