# SPDX-License-Identifier: Apache-2.0
"""The tracker of random numbers with the rules of Transformer Engine's, on the CPU.

There a state is a generator, which graphs may have recorded: what is drawn in a fork moves that
generator itself on, where upstream's tracker puts another tensor into its place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker


class GeneratorsTracker(CudaRNGStatesTracker):
    """Its states are generators."""

    def add(self, name: str, seed: int) -> None:
        """Have another state."""
        self._is_initialized = True
        self.states_[name] = torch.Generator().manual_seed(seed)

    def set_states(self, states: dict[str, Any]) -> None:
        """Those of a dense checkpoint are tensors."""
        super().set_states({name: _generator(state) for name, state in states.items()})

    @contextmanager
    def fork(self, name: str = 'model-parallel-rng') -> Iterator[None]:
        """Draw from that state."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name].get_state())
        try:
            yield
        finally:
            self.states_[name].set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def _generator(state: torch.Tensor | torch.Generator) -> torch.Generator:
    if isinstance(state, torch.Generator):
        return state
    made = torch.Generator()
    made.set_state(state)
    return made
