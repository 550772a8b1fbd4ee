# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine keeps in 16 or 8 bits: the bits themselves, and their scales.

The `get_unscaled_state` and `set_scaled_state` of its Adam, by which dense checkpoints go, round
once more: an fp8 state that went through them may be another. Weights in fp8 are rounded from the
masters with scales that all ranks agree on; the transposed copies of them, with which gradients are
computed, upstream makes anew when it gathers them.

Checked against megatron-core 0.19.2 and Transformer Engine 2.1 to 2.18, 2.20.
"""

from typing import Any

import torch

# Of a tensor or a weight with one scale, and of a weight with a scale for each block.
_BYTES = ('_data', '_rowwise_data')
_SCALES = ('_scale_inv', '_rowwise_scale_inv')


def raw(state: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the bits of an elementwise state or a weight; of fp8 the bytes.

    Without it an fp8 state would be read as what it stands for.
    """
    return next((getattr(state, name) for name in _BYTES if hasattr(state, name)), state)


def weight_scale(weight: torch.Tensor) -> torch.Tensor | None:
    """What the bytes of a weight in fp8 are multiplied by, fp32, whole on each rank; else None."""
    return next((getattr(weight, name) for name in _SCALES if hasattr(weight, name)), None)


def scales(inner: Any, main: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the bits of one parameter's states are multiplied by, fp32 [1], by name of a part.

    Those that the next update reads: of fp16 the optimizer's, of fp8 the tensor's. Others that the
    optimizer has (of bf16, of remainders, beside fp8) it writes before it reads them, or never
    reads.

    Args:
        inner: Transformer Engine's Adam, or any other, which has none.
        main: what the optimizer was given as the parameter.
    """
    found = {}
    for name, state in sorted(inner.state[main].items()):
        if hasattr(state, '_scale_inv'):
            found[f'scale_inv/{name}'] = state._scale_inv
        elif torch.is_tensor(state) and state.dtype == torch.float16:
            found[f'scale/{name}'] = inner._scales[main][name]
    return found
