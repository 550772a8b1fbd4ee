# SPDX-License-Identifier: Apache-2.0
"""Floating point operations so far, which upstream counts in a local variable of its loop.

The count in its log and dense checkpoints must not decrease when the loop is entered again after a
failure, so the count is computed from the number of samples.
"""

from collections.abc import Callable
from functools import cache

import msgspec


class CountedOperations(msgspec.Struct, frozen=True):
    """A known count: `operations` after `samples`."""

    samples: int
    operations: float


class OperationCount:
    """Computes the count after any number of samples. Training thread only.

    Args:
        per_sample: returns the operations per trained sample; called once training has begun.
    """

    def __init__(self, per_sample: Callable[[], float]) -> None:
        self._per_sample = cache(per_sample)
        self.base = CountedOperations(0, 0.0)

    def at(self, samples: int) -> float:
        """Operations after `samples` samples, summed over all ranks."""
        since = samples - self.base.samples
        return self.base.operations + since * self._per_sample() if since else self.base.operations
