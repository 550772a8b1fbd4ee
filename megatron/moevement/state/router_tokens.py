# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens that the routers of this rank send to each expert (paper section 3.5).

A router returns (probabilities, routing map), both of shape [tokens, experts]; tokens dropped by a
capacity factor are in neither.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.moevement.built import Chunks
from megatron.moevement.state.model_operators import num_experts, router_modules
from moevement_ext.plan.replanning import TokenCounter

if TYPE_CHECKING:  # jobs that lose no tokens do not import it
    from megatron.moevement.state.more_capacity import MoreCapacity


class RouterTokenCounter(TokenCounter):
    """Sums routing maps while `counting`; the counts stay on the device until `take`.

    Training thread only. The buffer is allocated once. A router in a recorded CUDA graph no longer
    counts, so the order of its experts stays.
    """

    def __init__(self, model: Chunks, device: torch.device) -> None:
        routers = list(router_modules(model))
        self._routers = [router for _, router in routers]
        self._more: MoreCapacity | None = None
        self._layers = [layer for layer, _ in routers]
        self._counts = torch.zeros(
            len(routers), num_experts(model), dtype=torch.float64, device=device
        )
        self._capacity = 0
        self.counting = False
        self.soft = False
        for index, (_, router) in enumerate(routers):
            router.register_forward_hook(self._hook(index))

    def take(self) -> dict[str, float]:
        """Counts since the last call, by expert operator; waits for the device."""
        counts: list[list[float]] = self._counts.tolist()
        self._counts.zero_()
        if self._more is not None:
            self._more.settle(self.counting)
        return {
            f'{layer}.expert{expert}': counts[index][expert]
            for index, layer in enumerate(self._layers)
            for expert in range(self._counts.shape[1])
        }

    def make_up(self, tokens: Mapping[str, float]) -> None:
        """Raise the capacity of experts until each has had `tokens` more; see `MoreCapacity`."""
        from megatron.moevement.state.more_capacity import MoreCapacity, by_layer

        experts = self._counts.shape[1]
        if self._more is None:
            shape = len(self._layers), experts
            self._more = MoreCapacity(self._routers, shape, self._counts.device)
        self._more.owe(by_layer(self._layers, experts, tokens))

    def take_capacity(self) -> float | None:
        """Maximum number of tokens per expert since the last call; None: no limit."""
        capacity, self._capacity = self._capacity, 0
        return capacity or None

    def _hook(self, index: int) -> object:
        def count(
            router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]
        ) -> None:
            if self.counting and torch.is_grad_enabled() and not self._is_recorded():
                counted = output[0 if self.soft else 1].detach()
                self._counts[index] += counted.sum(dim=0, dtype=torch.float64)
                if index == 0:
                    self._capacity += _capacity(router.config, *counted.shape)

        return count

    def _is_recorded(self) -> bool:
        return self._counts.is_cuda and torch.cuda.is_current_stream_capturing()


def _capacity(config: TransformerConfig, tokens: int, experts: int) -> int:
    """Upstream's limit of tokens per expert, given the number of tokens; 0: no limit."""
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return 0
    capacity: int = get_capacity(tokens * config.moe_router_topk, experts, factor)
    return capacity
