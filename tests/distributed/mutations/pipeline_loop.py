# SPDX-License-Identifier: Apache-2.0
"""Ways to break the recovery of the loop on plain torch. Every one must turn the bits red."""

from contextlib import nullcontext

from moevement_ext.job.torch_loop import loop_state
from moevement_ext.job.torch_loop.module_operators import ModuleOperators
from moevement_ext.job.torch_loop.torch_trainer import TorchTrainer


def norm_computed_by_a_stage_alone() -> None:
    """A stage that replays clips by the norm of its own gradients."""
    TorchTrainer.reduced = lambda self, known: nullcontext()


def random_numbers_not_restored() -> None:
    """Dropout draws what a fresh process draws."""
    loop_state.restore_generators = lambda state: None


def frozen_weights_not_loaded() -> None:
    """Operators that have no full state yet compute with what a fresh process has."""
    load = ModuleOperators.load

    def without_weights(self, header, payload, context):
        targets = [item for item in self._all() if item.operator in context.weights]
        kept = [item.source.clone() for item in targets]
        load(self, header, payload, context)
        for item, source in zip(targets, kept, strict=True):
            item.source.copy_(source)

    ModuleOperators.load = without_weights
