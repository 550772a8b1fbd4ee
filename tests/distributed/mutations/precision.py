# SPDX-License-Identifier: Apache-2.0
"""Upstream's precision-aware optimizer on the stand-in for Transformer Engine's Adam.

Also with a step of recovery left out that only state of 16 or 8 bits needs.
"""

import sys
from types import ModuleType
from typing import Any
from unittest import mock

from megatron.core import optimizer as upstream
from megatron.core.optimizer import optimizer_config

from megatron.moevement.state import training_state
from moevement_ext.memory.window.slot import Record
from tests.distributed.mutations import upstream_variants
from tests.distributed.mutations.whole_job import leave_out
from tests.stand_ins.fused_adam import FusedAdam


def precision_aware() -> None:
    """The optimizer takes the place of Transformer Engine's, which upstream's settings ask for.

    That only while they do: whatever else sees a `transformer_engine` takes all of it to be there.
    """
    upstream_variants.fused_adam()
    for module in (upstream, optimizer_config):
        module.is_te_min_version = lambda *_: True
    name = 'transformer_engine.pytorch.optimizers'
    optimizers = ModuleType(name)
    optimizers.FusedAdam = FusedAdam
    packages = [ModuleType(part) for part in ('transformer_engine', 'transformer_engine.pytorch')]
    stand_ins = {module.__name__: module for module in (*packages, optimizers)}
    check = optimizer_config.OptimizerConfig.__post_init__

    def checked(self: Any) -> None:
        with mock.patch.dict(sys.modules, stand_ins):
            check(self)

    optimizer_config.OptimizerConfig.__post_init__ = checked


def is_scale(record: Record) -> bool:
    """Of an elementwise state of the optimizer."""
    return record.part.startswith(('scale/', 'scale_inv/'))


def scales_not_restored() -> None:
    """States of 16 or 8 bits are read with the scales of a fresh process."""
    precision_aware()
    leave_out(is_scale)


def weight_from_master() -> None:
    """Compute weights are rounded from the masters that are loaded, which are rounded, too."""
    precision_aware()
    load = training_state.TrainingState.load

    def load_and_derive(self: Any, header: Any, payload: Any, context: Any) -> None:
        load(self, header, payload, context)
        for state in self.states_of(context.full):
            master = state.inner.get_unscaled_state(state.main, 'master_param')
            state.main.detach().copy_(master)
        for chunk in self.model:
            chunk.start_param_sync(force_sync=True)

    training_state.TrainingState.load = load_and_derive


def remainders_not_restored() -> None:
    """Of the masters the half that is in the weights comes back alone."""
    precision_aware()
    leave_out(lambda record: record.dtype == 'int16')
