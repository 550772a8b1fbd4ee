# SPDX-License-Identifier: Apache-2.0
"""Counters of a training loop, which recovery also sets."""

from typing import Protocol


class Counters(Protocol):
    """Position of training; upstream's arguments have these attributes. Training thread only.

    Samples are those of all ranks.
    """

    iteration: int
    """Committed iterations."""
    curr_iteration: int
    """Copy of `iteration` that upstream's loop reads."""
    train_iters: int | None
    """Last iteration; upstream computes it from `--train-samples` during set-up."""
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_train_samples: int
    num_floating_point_operations_so_far: float
    do_train: int
    """1 if there is training data; set during set-up."""
    do_valid: int
    do_test: int
