# SPDX-License-Identifier: Apache-2.0
"""State that Transformer Engine keeps for 16 and 8 bits: stored bits, scales, amax histories.

Dense checkpoints use its Adam's `get_unscaled_state` and `set_scaled_state`, which round once more:
fp8 state may differ afterwards. Weights in fp8 are rounded from the masters with scales that all
ranks agree on; upstream recreates the transposed copies for gradients when it gathers the weights.

With delayed scaling, a module that computes in fp8 multiplies by scales, derived from the largest
values of earlier passes; it has one pair of tensors for the forward direction and one for
gradients. Every pass of every module changes them, also with frozen operators, and so does an
evaluation, which no replay repeats. Therefore every slot captures them. Other recipes scale by the
values to round, and keep no state.

Checked against Transformer Engine 2.1 to 2.18, 2.20.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.utils import get_model_config

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


_DIRECTIONS = ('scaling_fwd', 'scaling_bwd')
_TENSORS = ('scale', 'amax_history')
# Products per module type, for modules without `num_gemms`; 1 for all others.
_PRODUCTS = {'DotProductAttention': 3, 'LayerNormMLP': 2}


@torch.no_grad()
def create_scaling(model: Sequence[torch.nn.Module]) -> None:
    """Create the state now instead of in the first forward pass, so that captures have sources.

    Nothing is reduced: reductions belong to the end of a pass with gradients.
    """
    config = get_model_config(model[0])
    if not config.fp8 or config.fp8_recipe != 'delayed':
        return  # no scaling state
    with fp8_utils.get_fp8_context(config):
        for chunk in model:
            for module in chunk.modules():
                initialize = getattr(module, 'init_fp8_metadata', None)
                if initialize is not None:
                    initialize(num_gemms=_products(module))


def scaling_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All scaling tensors of a model, fp32, by path of the module, direction and name."""
    for path, module in model.named_modules():
        meta = getattr(module, 'fp8_meta', {})
        for direction in _DIRECTIONS:
            state = meta.get(direction)
            if all(hasattr(state, name) for name in _TENSORS):
                for name in _TENSORS:
                    yield f'{path}.{direction}.{name}', getattr(state, name)


def _products(module: torch.nn.Module) -> int:
    known = (
        _PRODUCTS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _PRODUCTS
    )
    return int(getattr(module, 'num_gemms', None) or next(known, 1))
