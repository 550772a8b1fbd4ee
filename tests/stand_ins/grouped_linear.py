# SPDX-License-Identifier: Apache-2.0
"""Experts' linear layers with the rule of Transformer Engine's GroupedLinear, on the CPU.

Its weights are computed with in one call, which asks the first alone whether gradients of weights
are wanted. They can be computed later: then a backward pass puts aside what they are made of, and
`backward_dw` computes the oldest. `tests/transformer_engine` compares the two.
"""

from collections.abc import Callable
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        splits: list[int],
        later: Queue | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.weights_require_grad = weights[0].requires_grad
        ctx.splits = splits
        ctx.later = later
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
            return of_tokens, None, None, *(None for _ in weights)
        parts = tokens.split(ctx.splits)
        of_weights = [torch.empty_like(weight) for weight in weights]

        @torch.no_grad()
        def compute() -> list[torch.Tensor]:
            for one, part, of_weight in zip(gradients, parts, of_weights, strict=True):
                torch.mm(one.t(), part, out=of_weight)
            return of_weights

        if ctx.later is None:
            compute()
        else:
            ctx.later.put(compute)  # what is returned now has no values yet
        return of_tokens, None, None, *of_weights


class GroupedLinear(torch.nn.Module):
    """`weight0`, `weight1`, ... of shape [out_features, in_features]; without biases.

    Args:
        num_gemms: number of weights.
        in_features: last dimension of what goes in.
        out_features: last dimension of what comes out.
        init_method: fills a weight.
        params_dtype: of the weights.
        delay_wgrad_compute: compute gradients of weights in `backward_dw`, not in the backward
            pass.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[torch.Tensor], Any],
        params_dtype: torch.dtype,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.wgrad_store = SimpleNamespace(context=Queue() if delay_wgrad_compute else None)
        self._hooks: list[Callable[[], None]] = []
        for number in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype)
            init_method(weight)
            self.register_parameter(f'weight{number}', torch.nn.Parameter(weight))
        if delay_wgrad_compute:
            for weight in self.parameters():
                weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """Args: tokens [tokens, in_features], sorted by expert; how many there are of each."""
        return _GroupedProduct.apply(inp, m_splits, self.wgrad_store.context, *self.parameters())

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self._hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute what the oldest backward pass has put aside."""
        if self.wgrad_store.context is None:
            return
        if (
            self.wgrad_store.context.empty()
        ):  # versions differ in whether a grouped layer minds; others do
            raise RuntimeError('Pop empty queue')
        for weight, gradient in zip(
            self.parameters(), self.wgrad_store.context.get()(), strict=True
        ):
            weight.grad = gradient
        for hook in self._hooks:
            hook()


class _OfExperts(GroupedLinear):
    """What upstream makes of it for its experts; returns no bias beside the product."""

    def __init__(
        self,
        parallel_mode: str,
        num_gemms: int,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        **_: Any,
    ) -> None:
        from megatron.core.extensions import transformer_engine
        from megatron.core.tensor_parallel import random

        assert not bias and config.expert_tensor_parallel_size == 1
        with random.get_cuda_rng_tracker().fork(random.get_expert_parallel_rng_tracker_name()):
            super().__init__(
                num_gemms,
                input_size,
                output_size,
                init_method=init_method,
                params_dtype=config.params_dtype,
                delay_wgrad_compute=config.delay_wgrad_compute,
            )
        own_groups = config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1
        transformer_engine._set_expert_parameter_attributes(self, parallel_mode, own_groups)

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        return super().forward(inp, m_splits), None


def experts() -> Callable[..., Any]:
    """Builds upstream's experts of grouped linear layers from the stand-in."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    layers = GroupedMLPSubmodules(partial(_OfExperts, 'column'), partial(_OfExperts, 'row'))
    return partial(TEGroupedMLP, submodules=layers)
