# SPDX-License-Identifier: Apache-2.0
"""Ways to break the recovery of the data-parallel loop. Every one must turn the bits red."""

from examples.data_parallel_loop import Trainer
from moevement_ext.job.torch_loop.torch_trainer import TorchTrainer


def schedule_not_restored() -> None:
    """A schedule goes on from where a fresh process has it."""
    Trainer.load_state_dict = lambda self, state: None


def settings_of_groups_not_restored() -> None:
    """The optimizer goes on with the learning rate of a fresh process."""
    TorchTrainer._load_state = lambda self, state: self.load_state_dict(state['loop'])
