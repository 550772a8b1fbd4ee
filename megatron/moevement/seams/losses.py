# SPDX-License-Identifier: Apache-2.0
"""Copies the loss of each iteration on this rank to the host.

Wraps the schedules that `get_forward_backward_func` chooses from; on the last stage they return the
result of the loss function for each micro-batch. The copy runs after the backward pass. A reader
waits for it, which costs nothing: it reads when the update is queued, and upstream's `train_step`
then waits for the update itself.
"""

from collections.abc import Callable, Mapping, Sequence
from math import fsum

import torch

from megatron.moevement.seams import patches
from megatron.moevement.seams.micro_batches import SCHEDULES


class Losses:
    """Observes the runs of a schedule. Training thread only."""

    def __init__(self) -> None:
        self._host = torch.empty(0)
        self._micro_batches = 0
        self._arrived: torch.cuda.Event | None = None

    def install(self) -> None:
        """Wrap the schedules, for the lifetime of the process."""
        for name in SCHEDULES:
            patches.wrap(f'megatron.core.pipeline_parallel.schedules:{name}', self._run)

    def begin(self) -> None:
        """Begin an iteration: its loss is not available yet."""
        self._micro_batches, self._arrived = 0, None

    @property
    def newest(self) -> float | None:
        """Mean of the iteration's first kind of loss over the micro-batches of this rank.

        None on all stages but the last, and in an iteration whose passes are recorded as one
        graph. Waits for the backward pass.
        """
        if not self._micro_batches:
            return None
        if self._arrived:  # without clipping nothing has waited for the device yet
            self._arrived.synchronize()
        values = self._host.view(self._micro_batches, -1).tolist()
        over = fsum(value[1] for value in values) if len(values[0]) == 2 else len(values)
        return fsum(value[0] for value in values) / over if over else None

    def _run(self, original: Callable[..., Sequence[object]], **kwargs: object) -> Sequence[object]:
        reduced = original(**kwargs)
        if not kwargs.get('forward_only'):
            self._keep(_first_kind(reduced))
        return reduced

    def _keep(self, values: list[torch.Tensor]) -> None:
        self.begin()
        if not values or len({value.shape for value in values}) > 1:
            return
        if values[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        found = torch.cat(values)
        if self._host.shape != found.shape or self._host.dtype != found.dtype:
            self._host = torch.empty_like(found, device='cpu', pin_memory=found.is_cuda)
        self._host.copy_(found, non_blocking=True)
        self._micro_batches = len(values)
        if found.is_cuda:
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()


def _first_kind(reduced: Sequence[object]) -> list[torch.Tensor]:
    """Loss of each micro-batch, or its sum of losses and number of tokens, as upstream averages."""
    known = [one for one in reduced or () if isinstance(one, Mapping) and one]
    if not known or len(known) < len(reduced):
        return []
    values = [next(iter(one.values())) for one in known]
    return [value.detach().reshape(-1) for value in values if torch.is_tensor(value)]
