# SPDX-License-Identifier: Apache-2.0
"""Records the scalars that upstream reduces over stages, and plays them back in a replay.

The gradient norm and the overflow flag need the gradients of *all* operators of *all* stages. In a
conversion some operators are frozen, so these scalars cannot be computed again and come from the
record of the committed iteration.

Replaces, in `megatron.core.optimizer.optimizer`: `get_grad_norm_fp32` and
`MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan`.
Checked against megatron-core 0.19.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer.optimizer as upstream
import msgspec

from moevement_ext.errors import SparseCheckpointError


class GlobalScalars(msgspec.Struct):
    """What one optimizer step reduced, in the order of the calls."""

    grad_norms: list[float] = []
    overflows: list[bool] = []


class ScalarRecorder:
    """Stands between upstream's optimizers and their reductions. Used by the training thread."""

    def __init__(self) -> None:
        self._grad_norm = upstream.get_grad_norm_fp32
        self._check_overflow = (
            upstream.MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan
        )
        self._recorded = GlobalScalars()
        self._replayed: GlobalScalars | None = None

    def install(self) -> None:
        """Take the place of the two functions, for the life of the process."""
        recorder = self

        def grad_norm(*args: Any, **kwargs: Any) -> float:
            if recorder._replayed is not None:
                return _next(recorder._replayed.grad_norms, 'gradient norm')
            norm = recorder._grad_norm(*args, **kwargs)
            recorder._recorded.grad_norms.append(norm)
            return norm

        def check_overflow(self: Any) -> bool:
            overflow = recorder._check_overflow(self)
            if recorder._replayed is not None:
                return _next(recorder._replayed.overflows, 'overflow flag')
            recorder._recorded.overflows.append(overflow)
            return overflow

        upstream.get_grad_norm_fp32 = grad_norm
        upstream.MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan = check_overflow

    def peek(self) -> GlobalScalars:
        """The scalars that the next `take` will return, which leaves them to it."""
        return GlobalScalars(list(self._recorded.grad_norms), list(self._recorded.overflows))

    def take(self) -> GlobalScalars:
        """The scalars recorded since the last call."""
        recorded, self._recorded = self._recorded, GlobalScalars()
        return recorded

    @contextmanager
    def replaying(self, scalars: GlobalScalars) -> Iterator[None]:
        """Within the context, upstream gets the recorded scalars instead of computing them."""
        self._replayed = GlobalScalars(list(scalars.grad_norms), list(scalars.overflows))
        try:
            yield
        finally:
            self._replayed = None


def _next(values: list[Any], what: str) -> Any:
    if not values:
        raise SparseCheckpointError(
            f'Replay asks for a {what} that the committed iteration did not record; the flags of '
            'the job have changed since. Start it with the flags it had.'
        )
    return values.pop(0)
