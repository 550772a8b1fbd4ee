# SPDX-License-Identifier: Apache-2.0
"""Extra capacity for experts whose tokens were lost, until they have received as many again.

With `--moe-expert-capacity-factor`, tokens above the capacity of an expert are dropped; an expert
that is owed tokens drops only tokens above 1.1 times its capacity. Gained tokens are subtracted at
the end of an iteration, so that all its micro-batches, and recomputed passes, drop alike. Without
the factor, or where batches are padded to the capacity, nothing changes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron.moevement.seams import patches

FACTOR = 1.1
_DROPPING = 'megatron.core.transformer.moe.router:apply_router_token_dropping'

type _Routed = tuple[torch.Tensor, torch.Tensor]


class MoreCapacity:
    """Tokens owed to the experts of this rank's routers, by layer and expert. Training thread."""

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
