# SPDX-License-Identifier: Apache-2.0
"""Floating point operations so far: upstream counts them in a local variable of its loop.

What its log and its dense checkpoints say must not fall back when the loop is entered again after a
failure, so the count is worked out from the samples.
"""

from collections.abc import Callable
from functools import cached_property

import msgspec


class CountedOperations(msgspec.Struct, frozen=True):
    """A count that is known: `operations` after `samples`."""

    samples: int
    operations: float


class OperationCount:
    """Knows the count after any number of samples. Training thread only.

    Args:
        per_sample: operations that training on one sample takes; asked for when training begins.
    """

    def __init__(self, per_sample: Callable[[], float]) -> None:
        self._ask = per_sample
        self.base = CountedOperations(0, 0.0)

    def at(self, samples: int) -> float:
        """Operations when `samples` are consumed, over all ranks."""
        since = samples - self.base.samples
        return self.base.operations + since * self._per_sample if since else self.base.operations

    @cached_property
    def _per_sample(self) -> float:
        return self._ask()
