# SPDX-License-Identifier: Apache-2.0
"""Watches the runs of upstream's pipeline schedules: their micro-batches, and their losses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron.moevement.facts import JobFacts
from megatron.moevement.seams import patches
from moevement_ext.config import ConfigurationError

SCHEDULES = (
    'forward_backward_no_pipelining',
    'forward_backward_pipelining_without_interleaving',
    'forward_backward_pipelining_with_interleaving',
)


def _wrap_all(wrapper: patches.Wrapper) -> None:
    for name in SCHEDULES:
        patches.wrap(f'megatron.core.pipeline_parallel.schedules:{name}', wrapper)


class MicroBatches:
    """Checks that an iteration of a custom loop runs the schedule as declared. Training thread.

    The declared number and size of micro-batches and the sample length determine the data position,
    the space in the upstream log and what a replay receives. The communicator that the schedule is
    given logs the tensors between stages, or replays them.
    """

    def __init__(self, facts: JobFacts) -> None:
        self._size = facts.micro_batch_size
        self._tokens = facts.seq_length
        self._number = facts.global_batch_size // (self._size * facts.data_parallel_size)
        self._pipelined = facts.pipeline_model_parallel_size > 1
        self._given: Mapping[str, object] | None = None
        self._runs = 0

    def install(self) -> None:
        """Wrap the schedules, for the lifetime of the process."""
        _wrap_all(self._run)

    @contextmanager
    def iteration(self, given: Mapping[str, object]) -> Iterator[None]:
        """Allow one schedule within the context, with the keywords `given`."""
        self._given, self._runs = given, 0
        try:
            yield
        finally:
            self._given = None

    def check(self) -> None:
        """Check before an update that the schedule has run.

        Raises:
            ConfigurationError: it has not, on a job with several stages.
        """
        if self._given is not None and self._pipelined and self._runs == 0:
            raise ConfigurationError(
                'train_step called optimizer.step() before it ran a schedule of '
                'get_forward_backward_func(); with sparse checkpointing it must run one first.'
            )

    def _run(self, original: Callable[..., object], **kwargs: object) -> object:
        if self._given is not None:
            if not kwargs.get('forward_only'):
                self._runs += 1
                self._check_training(kwargs)
            elif self._pipelined:
                raise ConfigurationError(
                    'train_step ran a schedule with forward_only=True, which a stage that replays '
                    'alone cannot do; evaluate in the loop, after job.step.'
                )
        return original(**kwargs)

    def _check_training(self, kwargs: Mapping[str, Any]) -> None:
        assert self._given is not None
        if self._runs > 1:
            raise ConfigurationError(
                'train_step ran a schedule twice; with sparse checkpointing it must do so once, '
                'with all micro-batches of the iteration.'
            )
        asked = kwargs.get('num_microbatches'), kwargs.get('micro_batch_size')
        if asked != (self._number, self._size) or get_num_microbatches() != self._number:
            raise ConfigurationError(
                f'train_step ran {asked[0]} micro-batches of {asked[1]} samples, and Megatron is '
                f'set to {get_num_microbatches()}; by TrainingPlan an iteration has {self._number} '
                f'of {self._size} on each data-parallel rank. Run that, or change the plan.'
            )
        if (kwargs.get('seq_length') or 0) > self._tokens:
            raise ConfigurationError(
                f'train_step ran a schedule with seq_length={kwargs["seq_length"]}, but the log '
                f'has space for TrainingPlan.seq_length {self._tokens}; set that to the longest '
                'sequence.'
            )
        if any(kwargs.get(name) is not value for name, value in self._given.items()):
            raise ConfigurationError(
                f'train_step ran a schedule without {", ".join(self._given)}; it must pass on all '
                'keywords that it is called with: train_step(data, **schedule).'
            )


class Losses:
    """Copies the loss of each iteration on this rank to the host. Training thread only.

    On the last stage a schedule returns the result of the loss function for each micro-batch. The
    copy runs after the backward pass. A reader waits for it, which costs nothing: it reads when the
    update is queued, and upstream's `train_step` then waits for the update itself.
    """

    def __init__(self) -> None:
        self._host = torch.empty(0)
        self._micro_batches = 0
        self._arrived: torch.cuda.Event | None = None

    def install(self) -> None:
        """Wrap the schedules, for the lifetime of the process."""
        _wrap_all(self._run)

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
