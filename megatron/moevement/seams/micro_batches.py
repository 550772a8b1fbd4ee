# SPDX-License-Identifier: Apache-2.0
"""Checks that an iteration of a custom loop runs upstream's schedule as declared.

The declared number and size of micro-batches and the sample length determine the data position, the
space in the upstream log and what a replay receives. The communicator that the schedule is given
logs the tensors between stages, or replays them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron.moevement.facts import JobFacts
from megatron.moevement.seams import patches
from moevement_ext.config import ConfigurationError

SCHEDULES = (
    'forward_backward_no_pipelining',
    'forward_backward_pipelining_without_interleaving',
    'forward_backward_pipelining_with_interleaving',
)


class MicroBatches:
    """Checks each run of a schedule within an iteration. Training thread only."""

    def __init__(self, facts: JobFacts) -> None:
        self._size = facts.micro_batch_size
        self._tokens = facts.seq_length
        self._number = facts.global_batch_size // (self._size * facts.data_parallel_size)
        self._pipelined = facts.pipeline_model_parallel_size > 1
        self._given: Mapping[str, object] | None = None
        self._runs = 0

    def install(self) -> None:
        """Wrap the schedules, for the lifetime of the process."""
        for name in SCHEDULES:
            patches.wrap(f'megatron.core.pipeline_parallel.schedules:{name}', self._run)

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
