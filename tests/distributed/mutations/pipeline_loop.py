# SPDX-License-Identifier: Apache-2.0
"""Ways to break the recovery of the loop on plain torch. Every one must turn the bits red."""

from contextlib import nullcontext

import torch

from examples.pipeline_loop import PipelineTrainer, StageOperators, StageState


def norm_computed_by_a_stage_alone() -> None:
    """A stage that replays clips by the norm of its own gradients."""
    PipelineTrainer.reduced = lambda self, known: nullcontext()


def random_numbers_not_restored() -> None:
    """Dropout draws what a fresh process draws."""
    restore = StageState.restore

    def restored(self, state):
        generator = torch.get_rng_state()
        restore(self, state)
        torch.set_rng_state(generator)

    StageState.restore = restored


def frozen_weights_not_loaded() -> None:
    """Operators that have no full state yet compute with what a fresh process has."""
    load = StageOperators.load

    def without_light(self, header, payload, context):
        header.records = [item for item in header.records if item.operator in context.full]
        load(self, header, payload, context)

    StageOperators.load = without_light
