# SPDX-License-Identifier: Apache-2.0
"""Scales and amax histories of Transformer Engine's delayed scaling.

A module that computes in fp8 multiplies by scales that it has worked out from the largest values of
the passes before, one pair of tensors for what goes forward and one for gradients. Every pass of
every module changes them, of frozen operators too, and so does an evaluation, which no replay
repeats: they are captured in every slot. The other recipes scale by what they are about to round,
and keep nothing.

Checked against megatron-core 0.19.2 and Transformer Engine 2.1 to 2.18, 2.20.
"""

from collections.abc import Iterator, Sequence

import torch
from megatron.core import fp8_utils
from megatron.core.utils import get_model_config

from megatron.moevement.built import TransformerConfig

_DIRECTIONS = ('scaling_fwd', 'scaling_bwd')
_TENSORS = ('scale', 'amax_history')
# How many products a module is made of, where it does not say so itself; of others one.
_PRODUCTS = {'DotProductAttention': 3, 'LayerNormMLP': 2}


def is_delayed(config: TransformerConfig) -> bool:
    """True if a model of this configuration has such state."""
    return bool(config.fp8) and config.fp8_recipe == 'delayed'


@torch.no_grad()
def create(model: Sequence[torch.nn.Module]) -> None:
    """Have the state created now, as the first forward pass would, so that captures have sources.

    Nothing is reduced: that is done at the end of a pass with gradients only.
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
    """Every tensor of such state in a model, fp32, by the module's path and what it is."""
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
