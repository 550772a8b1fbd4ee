# SPDX-License-Identifier: Apache-2.0
"""In the place of what records passes with Transformer Engine, which needs a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.training import get_args, training

from megatron.moevement.seams import patches


class Recorder:
    """Says when upstream would record, and how many weights are frozen then."""

    iterations = 0
    """That this process has run, those that it replayed included."""

    def __init__(self, model: Sequence[torch.nn.Module], **settings: Any) -> None:
        self._model = model
        self._finished = False

    def capture_finished(self) -> bool:
        """Upstream records once."""
        return self._finished

    def graphs_created(self) -> bool:
        """There is nothing to delete."""
        return False

    def create_cudagraphs(self) -> None:
        """Upstream records now."""
        weights = [weight for chunk in self._model for weight in chunk.parameters()]
        frozen = sum(not weight.requires_grad for weight in weights)
        print(f'recorded after iterations: {self.iterations} | frozen: {frozen}')
        self._finished = True

    def cuda_graph_set_manual_hooks(self) -> None:
        """There are no graphs to set hooks of."""


def passes_are_recorded() -> None:
    """Upstream's loop is to record passes; the model was built without."""
    training.TECudaGraphHelper = Recorder

    def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        get_args().cuda_graph_impl = 'transformer_engine'
        get_args().cuda_graph_warmup_steps = 1
        return original(*args, **kwargs)

    def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        Recorder.iterations += 1
        return original(*args, **kwargs)

    patches.wrap('megatron.training.training:train', train)
    patches.wrap('megatron.training.training:train_step', train_step)
