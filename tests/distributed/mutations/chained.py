# SPDX-License-Identifier: Apache-2.0
"""Two optimizers of a chain, of which one sees overflows: their loss scales drift apart.

Also with a step of recovery left out that only these need.
"""

from typing import Any

import torch
from megatron.core.optimizer import optimizer as upstream
from megatron.training import get_args

from megatron.moevement.state import global_scalars, iteration_state

OVERFLOWING = 5, 7
"""Iterations."""


def experts_overflow() -> None:
    """A gradient of an expert is infinite, those of the rest of the model are as they are."""
    kind = upstream.MixedPrecisionOptimizer
    check = kind._unscale_main_grads_and_check_for_nan

    def check_infinite(self: Any) -> bool:
        of_experts = [
            shard
            for models, shards in zip(
                self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True
            )
            for model, shard in zip(models, shards, strict=True)
            if not getattr(model, 'allreduce', True) and shard.grad is not None
        ]
        if of_experts and get_args().curr_iteration + 1 in OVERFLOWING:
            of_experts[0].grad.fill_(torch.inf)
        overflow: bool = check(self)
        return overflow

    kind._unscale_main_grads_and_check_for_nan = check_infinite


def flag_of_any_for_all() -> None:
    """A replay takes what one optimizer saw for what all of them saw."""
    experts_overflow()

    def overflow(self: Any, original: Any, optimizer: Any) -> bool:
        found = original(optimizer)
        if self._replayed is not None:
            found = any(self._replayed.overflows)
        self._recorded.overflows.append(found)
        return bool(found)

    global_scalars.ScalarRecorder._overflow = overflow


def scale_of_the_second_not_restored() -> None:
    """Optimizers after the first go on with the loss scale of a fresh process."""
    experts_overflow()
    scalers = iteration_state._scalers
    restore = iteration_state.restore

    def restore_first(state: Any, counters: Any, optimizer: Any, scheduler: Any) -> None:
        kept = [(scaler, scaler._scale.clone()) for scaler in scalers(optimizer)[1:]]
        restore(state, counters, optimizer, scheduler)
        for scaler, scale in kept:
            scaler._scale.copy_(scale)

    iteration_state.restore = restore_first
