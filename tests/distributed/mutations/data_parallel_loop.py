# SPDX-License-Identifier: Apache-2.0
"""Ways to break the recovery of the data-parallel loop. Every one must turn the bits red.

`draws_by_data` is another loop instead, whose ranks must not copy state; `killed_after_the_job` is
a failure.
"""

import os
import signal
from typing import Any

import torch

from examples.data_parallel_loop import Trainer
from moevement_ext.job.job import Job
from moevement_ext.job.torch_loop.torch_trainer import TorchTrainer


def schedule_not_restored() -> None:
    """A schedule goes on from where a fresh process has it."""
    Trainer.load_state_dict = lambda self, state: None


def draws_by_data() -> None:
    """Each rank draws more random numbers, as many as its loss demands."""
    compute = Trainer.compute

    def drawing(self, iteration):
        loss = compute(self, iteration)
        torch.rand(1 + int(loss * 1e4) % 7)
        return loss

    Trainer.compute, Trainer.copies_from_peers = drawing, False


def draws_by_data_and_copies() -> None:
    draws_by_data()
    Trainer.copies_from_peers = True


def settings_of_groups_not_restored() -> None:
    """The optimizer goes on with the learning rate of a fresh process."""
    TorchTrainer._load_state = lambda self, state: self.load_state_dict(state['loop'])


def killed_after_the_job() -> None:
    """Rank 1 is killed once, as it writes its model after the job."""
    exits = Job.__exit__

    def exit_and_write(job: Job, *given: Any) -> None:
        exits(job, *given)
        if job.rank.number == 1 and not job.restarted:
            os.kill(os.getpid(), signal.SIGKILL)

    Job.__exit__ = exit_and_write  # type: ignore[method-assign]
