# SPDX-License-Identifier: Apache-2.0
"""Experts' linear layers with the rule of Transformer Engine's GroupedLinear, on the CPU.

Its weights are computed with in one call, which asks the first alone whether gradients of weights
are wanted. `tests/gpu/test_stand_ins.py` compares the two.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, splits: list[int], *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.weights_require_grad = weights[0].requires_grad
        ctx.splits = splits
        ctx.save_for_backward(tokens, *weights)
        parts = zip(tokens.split(splits), weights, strict=True)
        return torch.cat([functional.linear(part, weight) for part, weight in parts])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, *weights = ctx.saved_tensors
        gradients = gradient.split(ctx.splits)
        of_tokens = torch.cat(
            [one @ weight for one, weight in zip(gradients, weights, strict=True)]
        )
        if not ctx.weights_require_grad:
            return of_tokens, None, *(None for _ in weights)
        parts = tokens.split(ctx.splits)
        of_weights = [one.t() @ part for one, part in zip(gradients, parts, strict=True)]
        return of_tokens, None, *of_weights


class GroupedLinear(torch.nn.Module):
    """`weight0`, `weight1`, ... of shape [out_features, in_features]; without biases.

    Args:
        num_gemms: number of weights.
        in_features: last dimension of what goes in.
        out_features: last dimension of what comes out.
        init_method: fills a weight.
        params_dtype: of the weights.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[torch.Tensor], Any],
        params_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype)
            init_method(weight)
            self.register_parameter(f'weight{number}', torch.nn.Parameter(weight))

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """Args: tokens [tokens, in_features], sorted by expert; how many there are of each."""
        weights = (getattr(self, f'weight{number}') for number in range(self.num_gemms))
        return _GroupedProduct.apply(inp, m_splits, *weights)


class _OfExperts(GroupedLinear):
    """What upstream makes of it for its experts; returns no bias beside the product."""

    def __init__(
        self, parallel_mode: str, num_gemms: int, input_size: int, output_size: int, /,
        *, config: Any, init_method: Callable[[torch.Tensor], Any], bias: bool, **_: Any,
    ) -> None:  # fmt: skip
        from megatron.core.extensions import transformer_engine
        from megatron.core.tensor_parallel import random

        assert not bias and config.expert_tensor_parallel_size == 1
        with random.get_cuda_rng_tracker().fork(random.get_expert_parallel_rng_tracker_name()):
            super().__init__(
                num_gemms, input_size, output_size,
                init_method=init_method, params_dtype=config.params_dtype,
            )  # fmt: skip
        own_groups = config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1
        transformer_engine._set_expert_parameter_attributes(self, parallel_mode, own_groups)

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        return super().forward(inp, m_splits), None


def experts() -> Callable[..., Any]:
    """Builds upstream's experts of grouped linear layers from the stand-in."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    layers = GroupedMLPSubmodules(partial(_OfExperts, 'column'), partial(_OfExperts, 'row'))
    return partial(TEGroupedMLP, submodules=layers)
