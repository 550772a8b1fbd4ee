# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens that the routers of this rank send to each expert (paper section 3.5).

A router returns (probabilities, routing map), both of shape [tokens, experts]; tokens dropped by a
capacity factor are in neither.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.moevement.facts import Chunks
from megatron.moevement.seams import patches
from megatron.moevement.state.model_operators import num_experts, router_modules
from moevement_ext.plan.replanning import TokenCounter


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
            f'{layer}.expert{number}': counts[index][expert]
            for index, layer in enumerate(self._layers)
            for number, expert in enumerate(self._experts_of(self._routers[index]))
        }

    def _experts_of(self, router: Any) -> Sequence[int]:
        """Experts of a layer's operators: of its slots, where it has some."""
        placement = getattr(router, 'placement', None)
        return range(self._counts.shape[1]) if placement is None else placement.flatten().tolist()

    def make_up(self, tokens: Mapping[str, float]) -> None:
        """Raise the capacity of experts until each has had `tokens` more; see `MoreCapacity`."""
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
            is_recorded = self._counts.is_cuda and torch.cuda.is_current_stream_capturing()
            if self.counting and torch.is_grad_enabled() and not is_recorded:
                counted = output[0 if self.soft else 1].detach()
                self._counts[index] += counted.sum(dim=0, dtype=torch.float64)
                if index == 0:
                    self._capacity += _capacity(router.config, *counted.shape)

        return count


def _capacity(config: TransformerConfig, tokens: int, experts: int) -> int:
    """Upstream's limit of tokens per expert, given the number of tokens; 0: no limit."""
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return 0
    capacity: int = get_capacity(tokens * config.moe_router_topk, experts, factor)
    return capacity


FACTOR = 1.1
_DROPPING = 'megatron.core.transformer.moe.router:apply_router_token_dropping'

type _Routed = tuple[torch.Tensor, torch.Tensor]


class MoreCapacity:
    """Tokens owed to the experts of this rank's routers, by layer and expert. Training thread.

    With `--moe-expert-capacity-factor`, tokens above the capacity of an expert are dropped; an
    expert that is owed tokens drops only tokens above 1.1 times its capacity. Gained tokens are
    subtracted at the end of an iteration, so that all its micro-batches, and recomputed passes,
    drop alike. Without the factor, or where batches are padded to the capacity, nothing changes.
    """

    def __init__(
        self, routers: Sequence[torch.nn.Module], shape: tuple[int, int], device: torch.device
    ) -> None:
        self._owed = torch.zeros(shape, dtype=torch.float64, device=device)
        self._gained = torch.zeros_like(self._owed)
        self._layer: int | None = None
        for index, router in enumerate(routers):
            router.register_forward_pre_hook(partial(self._enters, index))
        patches.wrap(_DROPPING, self._drop)

    def owe(self, tokens: Sequence[Sequence[float]]) -> None:
        """Set the tokens owed from now on, by layer and expert; replaces earlier debts."""
        self._owed.copy_(torch.tensor(tokens, dtype=torch.float64))
        self._gained.zero_()

    def settle(self, committed: bool) -> None:
        """Subtract the tokens gained in an iteration, if it is committed."""
        if committed:
            self._owed -= self._gained
        self._gained.zero_()

    def _enters(self, layer: int, router: torch.nn.Module, inputs: object) -> None:
        self._layer = layer if router.training else None

    def _drop(self, original: Callable[..., _Routed], *args: Any, **kwargs: Any) -> _Routed:
        probs, routed = original(*args, **kwargs)
        if self._layer is None or kwargs.get('pad_to_capacity'):
            return probs, routed
        wider = {**kwargs, 'capacity_factor': FACTOR * kwargs['capacity_factor']}
        more_probs, more_routed = original(*args, **wider)
        owed = self._owed[self._layer] > 0
        if torch.is_grad_enabled():  # counts once if a forward pass is recomputed
            gained = more_routed.sum(dim=0) - routed.sum(dim=0)
            self._gained[self._layer] += gained * owed
        return torch.where(owed, more_probs, probs), torch.where(owed, more_routed, routed)


def by_layer(layers: Sequence[str], experts: int, tokens: Mapping[str, float]) -> list[list[float]]:
    """Convert tokens by operator name to lists by layer and expert."""
    return [
        [tokens.get(f'{layer}.expert{expert}', 0.0) for expert in range(experts)]
        for layer in layers
    ]
