# SPDX-License-Identifier: Apache-2.0
"""Records the scalars that upstream reduces over stages, and returns them in a replay.

The gradient norm and the overflow flag need the gradients of *all* operators of *all* stages. A
conversion has frozen operators, so it cannot compute these scalars and takes them from the record
of the committed iteration. The number of tokens that per-token loss divides by comes from the last
stage; a stage that replays alone takes that number from the record, too.

The norm is a float, or with Transformer Engine 2.14 and later a tensor, which the host does not
wait for before the step is done. Clipping by a tensor and by a float gives different bits, so a
replay returns the type that training had.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron.moevement.facts import Chunks, MegatronOptimizer, TransformerConfig
from megatron.moevement.seams import patches
from megatron.moevement.seams.upstream import detaches_heads
from megatron.moevement.state.optimizer_state import links
from moevement_ext import faults
from moevement_ext.errors import SparseCheckpointError
from moevement_ext.faults import Phase
from moevement_ext.memory.ledger import MAX_SCALARS
from moevement_ext.regroup.waits import waited


class GlobalScalars(msgspec.Struct):
    """Scalars that one optimizer step reduced, in the order of the calls."""

    grad_norms: list[float] = []
    overflows: list[bool] = []
    num_tokens: int = 0
    """Tokens of the global batch; 0 if the loss is not normalised by them."""


class ScalarRecorder:
    """Wraps the reductions of upstream's optimizers. Training thread only."""

    def __init__(self) -> None:
        self._recorded = GlobalScalars()
        self._grad_norms: list[float | torch.Tensor] = []
        self._num_tokens: torch.Tensor | None = None
        self._num_tokens_of_graph: torch.Tensor | None = None
        self._replayed: GlobalScalars | None = None

    def install(self) -> None:
        """Wrap the two functions, for the lifetime of the process."""
        optimizer = 'megatron.core.optimizer.optimizer'
        overflow = 'MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan'
        patches.wrap(f'{optimizer}:get_grad_norm_fp32', self._grad_norm)
        patches.wrap(f'{optimizer}:{overflow}', self._overflow)

    def _grad_norm(
        self, original: Callable[..., float | torch.Tensor], *args: object, **kwargs: object
    ) -> float | torch.Tensor:
        norm: float | torch.Tensor
        if self._replayed is not None:
            norm = _as_computed(_next(self._replayed.grad_norms, 'gradient norm'))
        else:
            norm = original(*args, **kwargs)
        self._grad_norms.append(norm)
        return norm

    def _overflow(self, original: Callable[..., bool], optimizer: MegatronOptimizer) -> bool:
        overflow = original(optimizer)
        if self._replayed is not None:
            overflow = _next(self._replayed.overflows, 'overflow flag')
        self._recorded.overflows.append(overflow)
        return overflow

    def wrap_reduction(self, config: TransformerConfig) -> None:
        """Record and replay the divisor of `config.finalize_model_grads_func`. Wraps once."""
        if getattr(config.finalize_model_grads_func, 'recorder', None) is self:
            return

        @waited.waiting_for(None)
        def finalize_recorded(
            finalize: Callable[..., object],
            model: Chunks,
            num_tokens: torch.Tensor | None = None,
            *args: object,
            **kwargs: object,
        ) -> object:
            faults.point(Phase.REDUCE)
            if num_tokens is None:
                return finalize(model, num_tokens, *args, **kwargs)
            if self._replayed is None:
                result = finalize(model, num_tokens, *args, **kwargs)
                self._num_tokens = num_tokens  # read after the step has waited for the device
                if torch.cuda.is_current_stream_capturing():
                    # A graph writes there in each iteration without calling this function.
                    self._num_tokens_of_graph = num_tokens
                return result
            result = finalize(model, None, *args, **kwargs)
            total = torch.full_like(num_tokens, self._replayed.num_tokens)
            for chunk in model:
                chunk.scale_gradients(1.0 / torch.clamp(total, min=1))
            self._num_tokens = total
            return result

        patches.wrap_object(config, 'finalize_model_grads_func', finalize_recorded)
        config.finalize_model_grads_func.recorder = self

    def peek(self) -> GlobalScalars:
        """The scalars that the next `take` will return; leaves the record unchanged."""
        self._recorded.grad_norms += [float(norm) for norm in self._grad_norms]
        self._grad_norms.clear()
        num_tokens = self._num_tokens_of_graph if self._num_tokens is None else self._num_tokens
        if num_tokens is not None:
            self._recorded.num_tokens = int(num_tokens.item())
            self._num_tokens = None
        return _copy(self._recorded)

    def roll_back(self, scalars: GlobalScalars) -> None:
        """Replace the record of an interrupted iteration; the next `take` returns `scalars`."""
        self._recorded = _copy(scalars)
        self._grad_norms.clear()
        self._num_tokens = None

    def take(self) -> GlobalScalars:
        """The scalars recorded since the last call."""
        recorded, self._recorded = self.peek(), GlobalScalars()
        return recorded

    @contextmanager
    def replaying(self, scalars: GlobalScalars) -> Iterator[None]:
        """Give upstream the recorded scalars within the context, instead of a reduction.

        Replayed scalars are recorded again, for the ledger of a stage that catches up.
        """
        self._replayed = _copy(scalars)
        try:
            yield
        finally:
            self._replayed = None


class Reduced(NamedTuple):
    """Scalars that an optimizer reduces in a step."""

    overflows: int = 1
    norms: int = 1
    """Gradient norms of one set of gradients."""
    sets: int = 1
    """Sets of gradients with separate norms."""


def reduced_by(optimizer: MegatronOptimizer, config: TransformerConfig) -> Reduced:
    """Scalars that upstream's optimizer reduces in a step, for this model configuration."""
    separate = detaches_heads(config) and optimizer.config.clip_grad > 0
    overflows = len(list(links(optimizer)))
    return Reduced(overflows, _norms_of_a_set(optimizer), 1 + separate)


def _norms_of_a_set(optimizer: MegatronOptimizer) -> int:
    """Chained optimizers reduce one norm together if their gradients are on the same ranks."""
    if not isinstance(optimizer, ChainedOptimizer) or not optimizer.chained_optimizers:
        return 1
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        return 1
    if optimizer.grads_states_parallel_group_is_shared():
        return 1
    return len(optimizer.chained_optimizers)


def check_room(optimizer: MegatronOptimizer, detached_heads: bool) -> None:
    """Check that a ledger entry can hold a step's scalars; each optimizer may reduce its own.

    Raises:
        SparseCheckpointError: an iteration could have too many scalars.
    """
    optimizers = len(list(links(optimizer)))
    norms = 1 + detached_heads
    if optimizers * norms > MAX_SCALARS:
        detached = ' and --mtp-detach-heads' if detached_heads else ''
        raise SparseCheckpointError(
            f'{optimizers} chained optimizers{detached} reduce {optimizers * norms} gradient norms '
            f'in a step; sparse checkpointing records {MAX_SCALARS}. Chain {MAX_SCALARS // norms} '
            'optimizers at most, or train without --sparse-ckpt.'
        )


def _copy(scalars: GlobalScalars) -> GlobalScalars:
    return GlobalScalars(list(scalars.grad_norms), list(scalars.overflows), scalars.num_tokens)


def _as_computed(norm: float) -> float | torch.Tensor:
    """A recorded norm as `get_grad_norm_fp32` returns it: fp32 [1] on the device, or a float."""
    if clip_grads.multi_tensor_scale_tensor_impl is None:
        return norm
    return torch.full([1], norm, dtype=torch.float32, device='cuda')


def _next[Scalar](values: list[Scalar], what: str) -> Scalar:
    if not values:
        raise SparseCheckpointError(
            f'Replay asks for a {what} that the committed iteration did not record; the flags of '
            'the job have changed since. Start it with the flags it had.'
        )
    return values.pop(0)
