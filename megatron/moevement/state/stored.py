# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine's Adam keeps in 16 or 8 bits: the bits themselves, and their scales.

Its own `get_unscaled_state` and `set_scaled_state`, by which dense checkpoints go, round once more:
an fp8 state that went through them may be another.

Checked against megatron-core 0.19.2 and Transformer Engine 2.1 to 2.18.
"""

from typing import Any

import torch


def raw(state: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the bits of an elementwise state; of fp8 the bytes.

    Without it an fp8 state would be read as what it stands for.
    """
    found: torch.Tensor = getattr(state, '_data', state)
    return found


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
