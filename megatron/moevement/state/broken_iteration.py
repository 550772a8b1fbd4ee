# SPDX-License-Identifier: Apache-2.0
"""Puts back what an iteration has changed before it was cut off, so that it can be run again.

Gradients need nothing: upstream clears them when an iteration begins. Parameters and optimizer
state are written only by the update; a rank that was cut off within it replays instead.

Checked against megatron-core 0.19.2.
"""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.core.timers import Timers
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP, SharedExpertState
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config
from megatron.training import global_vars

from megatron.moevement.built import Chunks, DistributedDataParallel
from megatron.moevement.state.model_operators import Operator
from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.batches import copy_all


class BrokenIteration:
    """Remembers, when an iteration begins, what it accumulates into. Training thread only.

    Args:
        model: model chunks of this rank.
        operators: inventory of this rank; their buffers (router bias, token counts) and their
            scaling state are kept.

    Raises:
        SparseCheckpointError: upstream no longer has the parts that are put back.
    """

    def __init__(self, model: Chunks, operators: Mapping[str, Operator]) -> None:
        _check()
        self._model = model
        self._buffers = [
            buffer
            for operator in operators.values()
            for buffer in (*operator.buffers.values(), *operator.scaling.values())
        ]
        self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        self._metrics: dict[str, torch.Tensor] = {}
        self._rerun_mode = get_rerun_state_machine().get_mode()

    def begin(self) -> None:
        """An iteration begins; a few small copies, allocated once."""
        metrics = _metrics()
        for name in metrics.keys() - self._metrics.keys():
            self._metrics[name] = torch.empty_like(metrics[name])
        copy_all(self._kept, self._buffers)
        copy_all([self._metrics[name] for name in metrics], list(metrics.values()))

    def put_back(self) -> None:
        """Undo what the iteration that began last has accumulated so far."""
        copy_all(self._buffers, self._kept)
        for name, values in _metrics().items():
            if name in self._metrics:
                values.copy_(self._metrics[name])
            else:
                values.zero_()

    def reset_loop_state(self) -> None:
        """Make upstream's loop enterable again, wherever it was left.

        That may be in a step, an evaluation or a checkpoint. What cut it off may hold its frames
        in a cycle, hence its activations, and the context in which upstream reduces no gradients:
        ended by the collector in the middle of a later iteration, it would have them reduced there.
        """
        gc.collect()
        machine = get_rerun_state_machine()
        machine.state = RerunState.NOT_RUNNING_YET
        machine.mode = self._rerun_mode
        machine.saved_state = None
        for timer in _timers():
            timer._started = False
        if torch._C._autograd._profiler_enabled():  # upstream's loop starts one of its own
            torch.autograd._disable_profiler()
        config = get_model_config(self._model[0])
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
        for chunk in self._model:
            chunk.train()
            self._release_chunk(chunk)
            _reset_shared_experts(chunk)

    def _release_chunk(self, chunk: DistributedDataParallel) -> None:
        """Forget collectives under way, and leave the hooks as a fresh model has them."""
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.grad_reduce_handle = group.param_gather_handle = None
            group.param_gather_dispatched = False
            # A new process learns in its first batch in which order gradients become ready, and
            # until then reduces them in another order: all ranks do so together.
            group.is_first_batch = True
            group.per_param_grad_ready_counts = {}
            group.golden_per_param_grad_ready_counts = {}
            group.is_last_microbatch = True
            group.grad_reduce_finished = False
        if chunk.ddp_config.overlap_param_gather and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def _reset_shared_experts(chunk: DistributedDataParallel) -> None:
    """Those that overlap with the exchange of tokens know how far they are in a layer."""
    for module in chunk.modules():
        if isinstance(module, SharedExpertMLP) and module.config.moe_shared_expert_overlap:
            module._overlap_state = SharedExpertState.IDLE
            module.cached_fc1_input = module.cached_fc2_input = None
            module.cached_fc2_output = module.cached_output = None


def _metrics() -> dict[str, torch.Tensor]:
    """What upstream adds up over an iteration to log it, by name."""
    of_experts = {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    of_more_tokens = MTPLossLoggingHelper.tracker.items()
    return of_experts | {
        f'mtp {name}': values for name, values in of_more_tokens if torch.is_tensor(values)
    }


def _timers() -> list[Any]:
    """Upstream's, if its trainer runs; the model's configuration has none in an evaluation."""
    timers = global_vars._GLOBAL_TIMERS
    return list(timers._timers.values()) if timers is not None else []


def _check() -> None:
    for owner, names in (
        (RerunState, ('NOT_RUNNING_YET',)),
        (RerunMode, ('DISABLED',)),
        (SharedExpertState, ('IDLE',)),
        (get_rerun_state_machine(), ('state', 'mode', 'saved_state', 'current_iteration')),
        (Timers(0, 'minmax'), ('_timers',)),
        (global_vars, ('_GLOBAL_TIMERS',)),
        (torch.autograd, ('_disable_profiler',)),
        (torch._C._autograd, ('_profiler_enabled',)),
        (get_moe_metrics_tracker(), ('metrics',)),
        (MTPLossLoggingHelper, ('tracker', 'clean_metrics_in_tracker')),
    ):
        for name in names:
            if not hasattr(owner, name):
                raise SparseCheckpointError(
                    f'{owner} has no {name}: this megatron-core is not the one sparse '
                    'checkpointing was checked against. Install megatron-core 0.19.2.'
                )
