# SPDX-License-Identifier: Apache-2.0
"""Frozen operators: forward and input gradient, but no weight gradient and no update.

A weight without `requires_grad` takes upstream's frozen path (`LinearWithFrozenWeight`), which does
not compute the weight gradient; this module adds such a path to the router's gating function. Adam
skips parameters without a gradient.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import get_model_config

from megatron.moevement.facts import Chunks, MegatronOptimizer
from megatron.moevement.seams import patches
from megatron.moevement.state.model_operators import Operator
from megatron.moevement.state.optimizer_state import ParameterState, chained

_RECORDED = 'megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__'
_GATING = 'megatron.core.transformer.moe.router:router_gating_linear'
_CLIPPING = 'megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32'
# Transformer Engine's grouped linear layers have one parameter per expert.
_OF_A_GROUP = re.compile(r'\.(?:weight|bias)\d+$')


@dataclass(eq=False)
class FrozenOperators:
    """Freezes operators while iterations are replayed. Training thread only.

    `skips`: weight gradients of frozen operators are not computed; else they are dropped.
    """

    _operators: Mapping[str, Operator]
    _states: Mapping[torch.nn.Parameter, ParameterState]
    _model: Chunks
    _optimizer: MegatronOptimizer
    _skips: bool = True

    def __post_init__(self) -> None:
        self._computed_together = list(_computed_together(self._operators))
        self.names: frozenset[str] = frozenset()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Prepare model and optimizer for replayed iterations; thaw everything at the end."""
        with ExitStack() as stack:
            stack.enter_context(patches.wrapped(_RECORDED, _compute))
            stack.enter_context(_reduced_after_backward(self._model))
            stack.enter_context(_gradient_through_embedding(self._model))
            stack.enter_context(_without_delayed_gradients(self._model))
            stack.enter_context(patches.wrapped(_GATING, _without_weight_gradient))
            stack.enter_context(patches.wrapped(_CLIPPING, _unless_all_are_frozen))
            config = get_model_config(self._model[0])
            reduction = 'finalize_model_grads_func'
            stack.callback(patches.wrap_object(config, reduction, self._reduce_with_frozen))
            for inner in chained(self._optimizer):
                stack.callback(patches.wrap_object(inner, 'prepare_grads', self._prepare_active))
            try:
                yield
            finally:
                self.freeze(())

    def freeze(self, names: Collection[str]) -> None:
        """Freeze exactly these operators; thaw all others."""
        self.names = frozenset(names)
        if not self._skips:
            return
        for owners, parameters in self._computed_together:
            for parameter in parameters:
                parameter.requires_grad_(not owners <= self.names)

    def _reduce_with_frozen(
        self, finalize: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Reduce packed gradients at the same places as in training.

        Upstream packs gradients of parameters that require one: those of norms, with sequence
        parallelism. The summation order over ranks depends on an element's place in the pack, so
        frozen parameters take part, with zeros.
        """
        frozen = self.names
        self.freeze(())
        try:
            return finalize(*args, **kwargs)
        finally:
            self.freeze(frozen)

    def _prepare_active(self, prepare: Callable[[], bool]) -> bool:
        overflow = prepare()
        for name in self.names & self._operators.keys():
            for parameter in self._operators[name].parameters.values():
                if parameter in self._states:
                    self._states[parameter].drop_gradient()
        return overflow


def _compute(
    _: Callable[..., object], recorder: FullCudaGraphWrapper, **schedule: object
) -> object:
    """Run passes that upstream records as a CUDA graph, without recording or running a graph.

    A graph recorded during a replay would leave out the gradients of frozen operators in all later
    iterations, so a replay does not count as a warm-up for it either. Graphs of single layers need
    no such care: with `--cuda-graph-impl transformer_engine` upstream's loop records between two of
    its own iterations, after those that a recovery replays.
    """
    return recorder.forward_backward_func(**schedule)


def _computed_together(
    operators: Mapping[str, Operator],
) -> Iterator[tuple[frozenset[str], list[torch.nn.Parameter]]]:
    """Groups of operators, and their parameters whose gradients one call computes.

    A grouped linear layer checks only its first expert's weight for `requires_grad`, so a group
    thaws as a whole; experts that should stay frozen are left out of the update. Those in slots are
    not in any group: another slot with the expert may have thawed, and needs all gradients.
    """
    together: dict[str, tuple[set[str], list[torch.nn.Parameter]]] = {}
    for operator in (one for one in operators.values() if not one.holds):
        for name, parameter in operator.parameters.items():
            owners, parameters = together.setdefault(_OF_A_GROUP.sub('', name), (set(), []))
            owners.add(operator.name)
            parameters.append(parameter)
    return ((frozenset(owners), parameters) for owners, parameters in together.values())


@contextmanager
def _reduced_after_backward(model: Chunks) -> Iterator[None]:
    """Reduce gradients and gather parameters after the backward pass, without overlap.

    The overlapped reduction waits for a gradient of every parameter of a bucket, and frozen
    parameters get none. The hooks that wait for parameters, which a custom loop has in every
    iteration, treat all parameters as trained. Buckets and bits are equal either way.
    """
    hooked = [chunk for chunk in model if getattr(chunk, 'remove_forward_pre_hook_handles', None)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    config = get_model_config(model[0])
    ddp = model[0].ddp_config
    saved = (ddp.overlap_grad_reduce, ddp.overlap_param_gather)
    functions = (config.grad_sync_func, config.param_sync_func)
    ddp.overlap_grad_reduce = ddp.overlap_param_gather = False
    config.grad_sync_func = config.param_sync_func = None
    try:
        yield
    finally:
        ddp.overlap_grad_reduce, ddp.overlap_param_gather = saved
        config.grad_sync_func, config.param_sync_func = functions
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


@contextmanager
def _gradient_through_embedding(model: Chunks) -> Iterator[None]:
    """Give the first stage's activations a gradient even when the embedding is frozen."""

    def attach(module: object, inputs: object, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    handles = [
        module.register_forward_hook(attach)
        for chunk in model
        for module in chunk.modules()
        if isinstance(module, LanguageModelEmbedding)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_delayed_gradients(model: Chunks) -> Iterator[None]:
    """Make layers of Transformer Engine compute only delayed gradients that exist.

    With `--delay-wgrad-compute` a backward pass stores the inputs of a weight's gradient, unless
    the weight is frozen; computing the gradient without them is an error.
    """

    def unless_frozen(layer: torch.nn.Module, compute: Callable[[], None]) -> None:
        if any(parameter.requires_grad for parameter in layer.parameters()):
            compute()

    with ExitStack() as stack:
        for module in (module for chunk in model for module in chunk.modules()):
            if hasattr(module, 'register_wgrad_accumulation_and_reduce_hooks'):
                wrapper = partial(unless_frozen, module)
                stack.callback(patches.wrap_object(module, 'backward_dw', wrapper))
        yield


class FrozenGating(moe_utils.RouterGatingLinearFunction):
    """Upstream's gating function, with a backward that skips the gradients of weight and bias."""

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the tokens, shape [..., hidden], by the same product as the trained path."""
        tokens, weight, _ = ctx.saved_tensors
        dtype = ctx.router_dtype
        flat = grad_output.view(-1, grad_output.shape[-1])
        gemm = moe_utils.te_general_gemm
        if gemm is not None and dtype != torch.float64:
            gradient = gemm(weight.to(dtype), flat, dtype, layout='NN', grad=True)[0]
        else:
            gradient = torch.mm(flat, weight.to(dtype))
        return gradient.to(ctx.input_dtype).view(tokens.shape), None, None, None


def _without_weight_gradient(
    active: Callable[..., torch.Tensor],
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    apply = active if weight.requires_grad else FrozenGating.apply
    logits: torch.Tensor = apply(tokens, weight, bias, dtype)
    return logits


def _unless_all_are_frozen(
    clip: Callable[..., None],
    parameters: list[torch.Tensor],
    max_norm: float,
    total_norm: float | torch.Tensor,
    use_decoupled_grad: bool = False,
) -> None:
    """Call upstream's clipping unless its list is empty, which TE and Apex kernels refuse."""
    gradient = 'decoupled_grad' if use_decoupled_grad else 'grad'
    if any(getattr(parameter, gradient, None) is not None for parameter in parameters):
        clip(parameters, max_norm, total_norm, use_decoupled_grad)
