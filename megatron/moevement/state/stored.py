# SPDX-License-Identifier: Apache-2.0
"""State that Transformer Engine stores in 16 or 8 bits: the stored bits, and their scales.

Dense checkpoints use its Adam's `get_unscaled_state` and `set_scaled_state`, which round once more:
fp8 state may differ afterwards. Weights in fp8 are rounded from the masters with scales that all
ranks agree on; upstream recreates the transposed copies for gradients when it gathers the weights.

Checked against Transformer Engine 2.1 to 2.18, 2.20.
"""

from typing import Any

import torch

# For tensors with one scale, and for weights with a scale per block.
_BYTES = ('_data', '_rowwise_data')
_SCALES = ('_scale_inv', '_rowwise_scale_inv')


def raw(state: torch.Tensor) -> torch.Tensor:
    """The tensor with the stored bits of an elementwise state or a weight; bytes if fp8.

    Reading an fp8 tensor directly would return dequantized values.
    """
    return next((getattr(state, name) for name in _BYTES if hasattr(state, name)), state)


def weight_scale(weight: torch.Tensor) -> torch.Tensor | None:
    """Scale of an fp8 weight, fp32, complete on each rank; None for other data types."""
    return next((getattr(weight, name) for name in _SCALES if hasattr(weight, name)), None)


def scales(inner: Any, main: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales of one parameter's states, fp32 [1], by name of the state.

    Only scales that the next update reads: the optimizer's for fp16, the tensor's for fp8. The
    optimizer's other scales (for bf16, for remainders, or in addition to fp8 tensors' own) are
    written before they are read, or never read. Optimizers other than Transformer Engine's Adam
    have no scales.
    """
    found = {}
    for name, state in sorted(inner.state[main].items()):
        if hasattr(state, '_scale_inv'):
            found[f'scale_inv/{name}'] = state._scale_inv
        elif torch.is_tensor(state) and state.dtype == torch.float16:
            found[f'scale/{name}'] = inner._scales[main][name]
    return found
