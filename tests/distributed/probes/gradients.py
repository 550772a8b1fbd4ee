# SPDX-License-Identifier: Apache-2.0
"""Watches the backward passes of a worker: matrix products and parameter gradients by operator."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.moevement.state import iteration_state
from megatron.moevement.state.frozen import FrozenGating, FrozenOperators
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.recover.conversion import Conversion
from tests.distributed.probes import training as probes

_LINEAR = (
    layers.LinearWithGradAccumulationAndAsyncCommunication,
    layers.LinearWithFrozenWeight,
    moe_utils.RouterGatingLinearFunction,
    FrozenGating,
)


class Products(TorchDispatchMode):
    """Counts matrix products inside the backward functions of the linears, by weight.

    `calls` counts backward calls and `products` matrix products by name of the weight; a weight
    whose gradient is not computed has one product (the input's gradient) per call, else two.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self._weights = weights
        self._present: str | None = None
        self.calls: Counter[str] = Counter()
        self.products: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._present is not None and func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.bmm,
            torch.ops.aten.addmm,
        ):
            self.products[self._present] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap the backward functions of all linears."""
        originals = [function.backward for function in _LINEAR]
        for function, original in zip(_LINEAR, originals, strict=True):
            function.backward = staticmethod(self._noting(original))
        try:
            with self:
                yield
        finally:
            for function, original in zip(_LINEAR, originals, strict=True):
                function.backward = staticmethod(original)

    def _noting(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(ctx: Any, *gradients: Any) -> Any:
            pointers = [t.data_ptr() for t in ctx.saved_tensors if t is not None]
            (self._present,) = [self._weights[p] for p in pointers if p in self._weights]
            self.calls[self._present] += 1
            try:
                return backward(ctx, *gradients)
            finally:
                self._present = None

        return noted


def count_weight_gradients() -> None:
    """Write down the counts of every replayed iteration by operator."""
    run = Conversion.run

    def counted(self: Any, trainer: Any, verification: Any) -> None:
        frozen, iterate = trainer.operators.frozen, trainer.iterate
        parameters = {
            name: parameter
            for operator in frozen._operators.values()
            for name, parameter in operator.parameters.items()
        }
        operator_of = {
            name: operator.name
            for operator in frozen._operators.values()
            for name in operator.parameters
        }
        accumulated: Counter[str] = Counter()
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: accumulated.update([name])
            )
        weights = {parameter.data_ptr(): name for name, parameter in parameters.items()}
        replayed: list[dict[str, Any]] = []

        def counting(iteration: int) -> Any:
            products = Products(weights)
            accumulated.clear()
            with products.watching():
                result = iterate(iteration)
            replayed.append(
                {
                    'frozen': self._slot(len(replayed)).context.weights,
                    'operators': operator_of,
                    'calls': products.calls,
                    'products': products.products,
                    'accumulated': dict(accumulated),
                }
            )
            return result

        trainer.iterate = counting
        run(self, trainer, verification)
        del trainer.iterate
        probes.report('replayed', replayed)

    Conversion.run = counted  # type: ignore[method-assign]


def count_weight_gradients_without_freezing() -> None:
    """The same counts where freezing does nothing."""
    FrozenOperators.freeze = lambda self, names: None  # type: ignore[method-assign]
    count_weight_gradients()


def compare_input_gradients() -> None:
    """Write down digests of the gradients between layers, for several sets of frozen operators."""
    probes.after_set_up(lambda _, training: probes.report('gradients', _gradients(training)))


def _gradients(training: TrainingState) -> dict[str, list[str]]:
    names = list(training.operators)
    experts = [name for name in names if training.operators[name].kind == 'expert']
    routers = [name for name in names if training.operators[name].kind == 'router']
    rests = [name for name in names if training.operators[name].kind == 'rest']
    sets: dict[str, Sequence[str]] = {
        'experts': experts,
        'routers': routers,
        'rests': rests,
        'one expert': experts[1:2],
        'first half': names[: len(names) // 2],
        'all': names,
    }
    rng = iteration_state.capture_rng()
    found = {'none': _backward(training, (), seed=1)}
    for name, frozen in sets.items():
        iteration_state.restore_rng(rng)  # the same dropout
        found[name] = _backward(training, frozen, seed=1)
    iteration_state.restore_rng(rng)
    found['other data'] = _backward(training, (), seed=2)
    return found


def _backward(training: TrainingState, frozen: Sequence[str], seed: int) -> list[str]:
    """Digests of the gradients that leave the loss, each layer and reach the embedding."""
    (chunk,) = unwrap_model(training.model)
    arrived: list[str] = []
    with training.frozen.replaying():
        training.frozen.freeze(frozen)
        places = [m for m in chunk.modules() if isinstance(m, LanguageModelEmbedding)]
        places += [m for m in chunk.modules() if isinstance(m, TransformerLayer)]
        handles = [place.register_forward_hook(_note_gradient(arrived)) for place in places]
        _loss(training.model[0], seed).backward()
        for handle in handles:
            handle.remove()
    for wrapped in training.model:
        wrapped.zero_grad_buffer()
    return arrived


def _note_gradient(arrived: list[str]) -> Callable[..., None]:
    def digest(gradient: torch.Tensor) -> None:
        assert gradient.count_nonzero() > 0
        content = gradient.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        arrived.append(hashlib.sha256(content).hexdigest())

    def attach(module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(digest)

    return attach


def _loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
    """Mean loss of one micro-batch of 2 random sequences."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (2, 33), generator=generator)
    positions = torch.arange(32).expand(2, 32)
    mask = torch.ones(1, 1, 32, 32).triu(1).bool()
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
