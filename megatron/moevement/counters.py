# SPDX-License-Identifier: Apache-2.0
"""What a training loop counts, and recovery sets."""

from typing import Protocol


class Counters(Protocol):
    """Where training is; upstream's arguments are such an object. Training thread only.

    Samples are those of all ranks.
    """

    iteration: int
    """Committed iterations."""
    curr_iteration: int
    """The same within upstream's loop, for what asks there."""
    train_iters: int | None
    """At which training ends; upstream works it out of `--train-samples` during set-up."""
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_train_samples: int
    num_floating_point_operations_so_far: float
    do_train: int
    """1 if there is anything to train on, as set-up learns from the data."""
    do_valid: int
    do_test: int
