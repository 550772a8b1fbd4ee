# SPDX-License-Identifier: Apache-2.0
"""How recovery leaves and enters Megatron's training loop, upstream's or a custom one."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import cache

import msgspec
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_model_config

from megatron.moevement.facts import Counters
from megatron.moevement.job import reports
from megatron.moevement.seams import upstream
from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.post_step import PostStep, PostStepProgress
from megatron.moevement.seams.schedules import Losses
from megatron.moevement.state.broken_iteration import BrokenIteration
from megatron.moevement.state.global_scalars import ScalarRecorder
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.recover.after_steps import AfterSteps


class CountedOperations(msgspec.Struct, frozen=True):
    """A known count: `operations` after `samples`."""

    samples: int
    operations: float


class OperationCount:
    """Computes the floating point operations after any number of samples. Training thread only.

    Upstream counts them in a local variable of its loop. The count in its log and dense checkpoints
    must not decrease when the loop is entered again after a failure.

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


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Wrappers around either kind of loop; created before the model."""

    recorder: ScalarRecorder
    """Records the scalars that all ranks reduce together."""
    data: DataPosition
    """Moves the data of this rank."""
    post_step: PostStep
    """Tracks the steps after an iteration."""
    operations: OperationCount
    """Counts floating point operations, for upstream's own count."""
    losses: Losses
    """The loss of each iteration on this rank."""
    after_steps: AfterSteps
    """The work of a custom loop between iterations."""


class MegatronHandover(msgspec.Struct, frozen=True):
    """Information that survivors give a replacement process."""

    progress: PostStepProgress
    """Progress of the steps after the newest committed iteration."""
    runs: tuple[int, int, int]
    """Upstream's `do_train`, `do_valid` and `do_test`."""
    operations: CountedOperations
    """Base of the count of floating point operations."""
    after_steps: bytes
    """Progress of a custom loop's work after that iteration."""


_HANDOVER = msgspec.msgpack.Decoder(MegatronHandover)


def decode_handover(encoded: bytes) -> MegatronHandover:
    return _HANDOVER.decode(encoded)


@dataclass(eq=False)
class MegatronLoop:
    """Megatron's training loop, a `moevement_ext.recover.trainer.Loop`. Training thread only.

    `broken` undoes interrupted iterations; None if the loop is never entered again.
    """

    _training: TrainingState
    _counters: Counters
    around: InitVar[Surroundings]
    _broken: BrokenIteration | None

    def __post_init__(self, around: Surroundings) -> None:
        self._data = around.data
        self._post_step = around.post_step
        self._operations = around.operations
        self._after_steps = around.after_steps

    def start(self) -> None:
        """Start counting and reporting from upstream's counters."""
        reports.forget_points_after(self._counters.iteration)
        self._operations.base = CountedOperations(
            self._counters.consumed_train_samples,
            float(self._counters.num_floating_point_operations_so_far),
        )

    def note_start(self) -> None:
        """Record the state with which the loop is entered; called once, before the first entry."""
        if self._broken is not None:
            self._broken.note_start()

    def committed(self, iteration: int) -> None:
        """Mark the steps after `iteration` as pending."""
        self._post_step.begin(iteration)
        self._after_steps.committed(iteration)

    def hand_over(self) -> bytes:
        counters = self._counters
        return msgspec.msgpack.encode(
            MegatronHandover(
                self._post_step.progress(),
                (counters.do_train, counters.do_valid, counters.do_test),
                self._operations.base,
                self._after_steps.hand_over(),
            )
        )

    def leave(self) -> None:
        assert self._broken is not None  # required by localized recovery, the only caller
        self._broken.reset_loop_state()
        self._post_step.reset_loop_state()

    def enter(self, others: Sequence[bytes]) -> None:
        known = [decode_handover(item) for item in others]
        self._operations.base = known[0].operations
        self._post_step.take_over([item.progress for item in known])
        self._after_steps.enter([item.after_steps for item in known])
        self._count_operations()
        config = get_model_config(self._training.model[0])
        upstream.fill_first_step_caches(self._training.optimizer, config)

    def finish_post_step(
        self, target: int, others: Sequence[bytes], entry: LedgerEntry | None
    ) -> bool:
        """Run the evaluation and dense checkpoint after `target` if some rank has not done so."""
        self._training.gather_parameters()
        self._count_operations()
        known = [decode_handover(item) for item in others]
        grows = entry is not None and get_num_microbatches() > entry.num_microbatches
        self._post_step.catch_up(target, [item.progress for item in known], self._data, grows)
        self._after_steps.finish_post_step(target, [item.after_steps for item in known], entry)
        return not self._post_step.exits(target)

    def _count_operations(self) -> None:
        operations = self._operations.at(self._counters.consumed_train_samples)
        self._counters.num_floating_point_operations_so_far = operations
