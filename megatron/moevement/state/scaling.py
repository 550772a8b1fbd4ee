# SPDX-License-Identifier: Apache-2.0
"""Scales and amax histories of Transformer Engine's delayed scaling.

A module that computes in fp8 multiplies by scales, derived from the largest values of earlier
passes; it has one pair of tensors for the forward direction and one for gradients. Every pass of
every module changes them, also with frozen operators, and so does an evaluation, which no replay
repeats. Therefore every slot captures them. Other recipes scale by the values to round, and keep no
state.

Checked against Transformer Engine 2.1 to 2.18, 2.20.
"""

from collections.abc import Iterator, Sequence

import torch
from megatron.core import fp8_utils
from megatron.core.utils import get_model_config

from megatron.moevement.built import TransformerConfig

_DIRECTIONS = ('scaling_fwd', 'scaling_bwd')
_TENSORS = ('scale', 'amax_history')
# Products per module type, for modules without `num_gemms`; 1 for all others.
_PRODUCTS = {'DotProductAttention': 3, 'LayerNormMLP': 2}


def is_delayed(config: TransformerConfig) -> bool:
    """True if a model of this configuration has scaling state."""
    return bool(config.fp8) and config.fp8_recipe == 'delayed'


@torch.no_grad()
def create(model: Sequence[torch.nn.Module]) -> None:
    """Create the state now instead of in the first forward pass, so that captures have sources.

    Nothing is reduced: reductions belong to the end of a pass with gradients.
    """
    config = get_model_config(model[0])
    if not is_delayed(config):
        return
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
