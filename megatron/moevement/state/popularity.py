# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens that the routers of this rank send to each expert (paper section 3.5).

Checked against megatron-core 0.19.2: a router returns (probabilities, routing map), the map boolean
of shape [tokens, experts].
"""

import torch

from megatron.moevement.built import Chunks
from megatron.moevement.state.model_operators import num_experts, router_modules


class RouterTokenCounter:
    """Adds up routing maps while `counting`; the counts stay on the device until asked for.

    Used by the training thread. The buffer is allocated once. A router in a CUDA graph counts no
    more once that is recorded, so the order of its experts stays.
    """

    def __init__(self, model: Chunks, device: torch.device) -> None:
        routers = list(router_modules(model))
        self._layers = [layer for layer, _ in routers]
        self._counts = torch.zeros(
            len(routers), num_experts(model), dtype=torch.int64, device=device
        )
        self.counting = False
        for index, (_, router) in enumerate(routers):
            router.register_forward_hook(self._hook(index))

    def take(self) -> dict[str, int]:
        """Counts by expert operator since the last call; waits for the device."""
        counts: list[list[int]] = self._counts.tolist()
        self._counts.zero_()
        return {
            f'{layer}.expert{expert}': counts[index][expert]
            for index, layer in enumerate(self._layers)
            for expert in range(self._counts.shape[1])
        }

    def _hook(self, index: int) -> object:
        def count(module: object, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
            if self.counting and torch.is_grad_enabled() and not self._is_recorded():
                self._counts[index] += output[1].detach().sum(dim=0)

        return count

    def _is_recorded(self) -> bool:
        return self._counts.is_cuda and torch.cuda.is_current_stream_capturing()
