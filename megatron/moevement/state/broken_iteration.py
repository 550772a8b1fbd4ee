# SPDX-License-Identifier: Apache-2.0
"""Undoes the changes of an interrupted iteration, so that the iteration can run again.

Gradients need no undoing: upstream clears them at the start of an iteration. Only the update writes
parameters and optimizer state; a rank that was interrupted within the update replays instead.
"""

import gc
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP, SharedExpertState
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config
from megatron.training import global_vars

from megatron.moevement.facts import Chunks, DistributedDataParallel
from megatron.moevement.state.model_operators import Operator
from moevement_ext.memory.tensors import copy_all

# Timer that upstream divides by all iterations since its last report; a survivor still counts them.
_REPORTED = 'interval-time'


class _LoopEntry(NamedTuple):
    """What the loop was entered with for the first time."""

    functions: tuple[object, object, object]
    """For the start and the end of reductions, and for the gathering of parameters."""
    evaluating: list[torch.nn.Module]
    """Modules that are not in training mode."""
    hooked: list[bool]
    """Whether each chunk has hooks that wait for parameters."""


class BrokenIteration:
    """Copies, at the start of an iteration, the tensors it accumulates into. Training thread only.

    Args:
        operators: inventory of this rank; their buffers (router bias, token counts) and their
            scaling state are kept.
    """

    def __init__(self, model: Chunks, operators: Mapping[str, Operator]) -> None:
        self._model = model
        self._buffers = [
            buffer
            for operator in operators.values()
            for buffer in (*operator.buffers.values(), *operator.scaling.values())
        ]
        self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        self._metrics: dict[str, torch.Tensor] = {}
        self._rerun_mode = get_rerun_state_machine().get_mode()
        self._entry: _LoopEntry | None = None

    def note_start(self) -> None:
        """Record functions, modes and hooks with which the loop is entered for the first time.

        The program may set them earlier, in code that a survivor does not run again; survivors and
        new processes must enter the loop with the same ones.
        """
        config = get_model_config(self._model[0])
        modules = [module for chunk in self._model for module in chunk.modules()]
        self._entry = _LoopEntry(
            (config.no_sync_func, config.grad_sync_func, config.param_sync_func),
            [module for module in modules if not module.training],
            [bool(chunk.remove_forward_pre_hook_handles) for chunk in self._model],
        )

    def begin(self) -> None:
        """Make a few small copies at the start of an iteration; their memory is allocated once."""
        metrics = _metrics()
        for name in metrics.keys() - self._metrics.keys():
            self._metrics[name] = torch.empty_like(metrics[name])
        copy_all(self._kept, self._buffers)
        copy_all([self._metrics[name] for name in metrics], list(metrics.values()))

    def roll_back(self) -> None:
        copy_all(self._buffers, self._kept)
        for name, values in _metrics().items():
            if name in self._metrics:
                values.copy_(self._metrics[name])
            else:
                values.zero_()

    def reset_loop_state(self) -> None:
        """Make upstream's loop enterable again, wherever it was interrupted.

        That may be in a step, an evaluation or a checkpoint. The error may hold the interrupted
        frames in a reference cycle: their activations, and the context in which upstream reduces no
        gradients. If the garbage collector ended that context within a later iteration, upstream
        would reduce there.
        """
        assert self._entry is not None  # the loop has been entered
        gc.collect()
        machine = get_rerun_state_machine()
        machine.state = RerunState.NOT_RUNNING_YET
        machine.mode = self._rerun_mode
        machine.saved_state = None
        for timer in _timers():
            if timer._started and timer.name == _REPORTED:
                timer._elapsed += time.time() - timer._start_time
            timer._started = False
        if torch._C._autograd._profiler_enabled():  # upstream's loop starts a new profiler
            torch.autograd._disable_profiler()
        config = get_model_config(self._model[0])
        config.no_sync_func, config.grad_sync_func, config.param_sync_func = self._entry.functions
        for chunk, hooked in zip(self._model, self._entry.hooked, strict=True):
            chunk.train()
            self._release_chunk(chunk, hooked)
            _reset_shared_experts(chunk)
        for module in self._entry.evaluating:
            module.training = False
        drop_put_aside(self._model)

    def _release_chunk(self, chunk: DistributedDataParallel, hooked: bool) -> None:
        """Drop pending collectives; reset the reductions to those of a new model, and the hooks."""
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.grad_reduce_handle = group.param_gather_handle = None
            group.param_gather_dispatched = False
            # A new process determines in its first batch the order in which gradients become
            # ready, and reduces in another order until then: all ranks must do so together.
            group.is_first_batch = True
            group.per_param_grad_ready_counts = {}
            group.golden_per_param_grad_ready_counts = {}
            group.is_last_microbatch = True
            group.grad_reduce_finished = False
        if hooked and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()
        elif chunk.remove_forward_pre_hook_handles and not hooked:
            chunk.disable_forward_pre_hook(param_sync=False)


def _reset_shared_experts(chunk: DistributedDataParallel) -> None:
    """Reset shared experts, which overlap with the token exchange by a state machine per layer."""
    for module in chunk.modules():
        if isinstance(module, SharedExpertMLP) and module.config.moe_shared_expert_overlap:
            module._overlap_state = SharedExpertState.IDLE
            module.cached_fc1_input = module.cached_fc2_input = None
            module.cached_fc2_output = module.cached_output = None


def _metrics() -> dict[str, torch.Tensor]:
    """Metrics that upstream accumulates for its log over an iteration, by name."""
    of_experts = {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    of_more_tokens = MTPLossLoggingHelper.tracker.items()
    return of_experts | {
        f'mtp {name}': values for name, values in of_more_tokens if torch.is_tensor(values)
    }


def _timers() -> list[Any]:
    """Upstream's timers, from its global variable: an evaluation removes them from the config."""
    timers = global_vars._GLOBAL_TIMERS
    return list(timers._timers.values()) if timers is not None else []


QUEUE = 'wgrad_store'
"""Attribute of layers of Transformer Engine: operands of weight gradients that are computed later
(`--delay-wgrad-compute`)."""
STASH = 'fp8_tensors_recompute_buffer'
"""Scales of delayed scaling in the first forward pass, for a recomputation."""
FIRST = '_is_first_fp8_module'
"""Whether a recomputed part begins with the first fp8 layer."""
# Lists of upstream's output layer (`--defer-embedding-wgrad-compute`).
_OF_OUTPUT = ('embedding_activation_buffer', 'grad_output_buffer')


def drop_put_aside(model: Chunks) -> None:
    """Empty the queues that an interrupted iteration has filled for its own later steps.

    Queues in modules outlive the iteration. The next one would take the entries of the interrupted
    one first, and its own entries one micro-batch late, for the rest of the job. A dense save, too,
    has a queue. Checked against Transformer Engine 2.20.
    """
    for module in _modules(model):
        store = getattr(module, QUEUE, None)
        if store is not None and store.context is not None:
            store.context.queue.clear()
        for name in _OF_OUTPUT:
            if isinstance(buffer := getattr(module, name, None), list):
                buffer.clear()
    for queue in _of_recomputations():
        queue.clear()
    with suppress(OSError, EOFError):  # the process that holds the queue is gone: no save succeeds
        _drop_results_of_writing()


def _drop_results_of_writing() -> None:
    """Drop the results of files that a dense save has written.

    Between writing and reading the results a rank waits for the others. A result that is left is
    read by the next save, also if the writing of that save fails.
    """
    results = filesystem_async._results_queue
    while results is not None and not results.empty():
        results.get_nowait()


def _modules(model: Chunks) -> Iterator[torch.nn.Module]:
    for chunk in model:
        for module in chunk.modules():
            yield module
            # Upstream keeps these layers, which share the weights, out of the tree of modules.
            for fused in getattr(module, '_fused_ops', None) or ():
                yield from fused.modules()


def _of_recomputations() -> Iterator[Any]:
    quantization = sys.modules.get('transformer_engine.pytorch.quantization')
    if quantization is None:
        return
    manager = quantization.FP8GlobalStateManager
    yield from getattr(getattr(manager, 'quantization_state', manager), STASH)
    recomputation = sys.modules['transformer_engine.pytorch.distributed']
    yield getattr(recomputation.activation_recompute_forward, FIRST)
