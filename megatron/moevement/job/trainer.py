# SPDX-License-Identifier: Apache-2.0
"""A Megatron training loop as recovery sees it (see `moevement_ext.recover.trainer`).

Checked against megatron-core 0.19.2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config

from megatron.moevement.counters import Counters
from megatron.moevement.facts import JobFacts
from megatron.moevement.seams import upstream
from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.p2p import StagePipeline
from megatron.moevement.seams.post_step import PostStep, PostStepProgress
from megatron.moevement.state import iteration_state
from megatron.moevement.state.broken_iteration import BrokenIteration
from megatron.moevement.state.dp_copy import replicas
from megatron.moevement.state.global_scalars import GlobalScalars, ScalarRecorder
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.operation_count import CountedOperations, OperationCount
from megatron.moevement.state.popularity import TokenCounter
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.membership.place import Place
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.recover.trainer import Committed

_SPARE_STATE_BYTES = 4096


class MegatronHandover(msgspec.Struct, frozen=True):
    """What survivors tell a new process."""

    progress: PostStepProgress
    """In what follows the newest committed iteration."""
    runs: tuple[int, int, int]
    """Upstream's `do_train`, `do_valid` and `do_test`."""
    operations: CountedOperations
    """Where the count of floating point operations began."""


def decode_handover(encoded: bytes) -> MegatronHandover:
    """Inverse of what `MegatronTrainer.hand_over` returns."""
    return msgspec.msgpack.decode(encoded, type=MegatronHandover)


@dataclass(frozen=True)
class Surroundings:
    """What wraps a loop of either kind; made before the model is."""

    recorder: ScalarRecorder
    """Of the scalars that all ranks reduce together."""
    data: DataPosition
    """Where the data of this rank go on."""
    post_step: PostStep
    """What the loop does after an iteration."""
    operations: OperationCount
    """Floating point operations so far, for upstream's own count."""


class MegatronTrainer:
    """Model, optimizer, data and pipeline of this rank. Training thread only.

    Args:
        facts: of the job.
        counters: of the loop.
        training: the training state.
        around: what wraps the loop.
        localized: the loop is entered again after failures of other ranks.
    """

    def __init__(
        self,
        facts: JobFacts,
        counters: Counters,
        training: TrainingState,
        around: Surroundings,
        localized: bool,
    ) -> None:
        self._facts = facts
        self._counters = counters
        self.operators = training
        self.pipeline = StagePipeline(facts, training.model)
        self.tokens = TokenCounter(training.model, training.device)
        self._recorder = around.recorder
        self._data = around.data
        self._post_step = around.post_step
        self._operations = around.operations
        self._broken = BrokenIteration(training.model, training.operators) if localized else None
        self._step: Callable[..., Any] | None = None

    @property
    def place(self) -> Place:
        """In upstream's layout."""
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return Place(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            members=torch.distributed.get_process_group_ranks(group),
            group=group,
            replicas=replicas(self._facts),
            interleaved=len(self.operators.model) > 1,
        )

    @property
    def iteration(self) -> int:
        """Committed iterations."""
        return self._counters.iteration

    @property
    def last_iteration(self) -> int:
        """`--train-iters`, which upstream works out from `--train-samples` before it trains."""
        assert self._counters.train_iters is not None
        return self._counters.train_iters

    def use(self, train_step: Callable[..., Any]) -> None:
        """Have iterations run by this from now on, called as `train_step(iteration=, **schedule)`.

        `schedule` is what the pipeline schedule is to be given.
        """
        self._recorder.wrap_reduction(get_model_config(self.operators.model[0]))
        self._step = train_step

    def start(self) -> None:
        """Training begins where upstream's counters are."""
        self._operations.base = CountedOperations(
            self._counters.consumed_train_samples,
            float(self._counters.num_floating_point_operations_so_far),
        )

    # An iteration

    def state(self) -> bytes:
        """The small state now."""
        state = self._state(self._counters.iteration, self._recorder.peek())
        return iteration_state.encode(state)

    def state_bytes(self) -> int:
        """Upper bound of its size; states of random numbers have a fixed one."""
        longest = self._state(0, GlobalScalars([0.1] * 64, [False] * 64))
        return len(iteration_state.encode(longest)) + _SPARE_STATE_BYTES

    def begin_iteration(self, iteration: int) -> bytes:
        """The small state that the iteration after `iteration` starts from."""
        state = self._state(iteration, self._recorder.take())
        if self._broken is not None:
            self._broken.begin()
        return iteration_state.encode(state)

    def iterate(self, iteration: int) -> Any:
        """Upstream's `train_step`, or what stands for it."""
        assert self._step is not None
        return self._step(iteration=iteration, **self.pipeline.schedule(iteration))

    def record(self, iteration: int, skipped: bool) -> Committed:
        """What the update that led to `iteration` leaves.

        Upstream moves the scheduler and counts the samples only later, when its own reductions of
        what to log are through; a failure in those must not undo the iteration.
        """
        num_microbatches = get_num_microbatches()
        samples = self._facts.data_parallel_size * self._facts.micro_batch_size * num_microbatches
        state = self._state(iteration, self._recorder.peek())
        state.consumed_train_samples += samples
        state.floating_point_operations = self._operations.at(state.consumed_train_samples)
        state.scheduler_steps += 0 if skipped else samples
        entry = LedgerEntry(
            iteration=iteration,
            grad_norms=state.scalars.grad_norms,
            overflows=state.scalars.overflows,
            num_microbatches=num_microbatches,
            consumed_samples=state.consumed_train_samples,
            num_tokens=state.scalars.num_tokens,
        )
        return Committed(iteration_state.encode(state), entry)

    def committed(self, iteration: int) -> None:
        """What follows `iteration` is not done yet."""
        self._post_step.begin(iteration)

    def _state(self, iteration: int, scalars: GlobalScalars) -> IterationState:
        training = self.operators
        return iteration_state.capture(
            self._counters, iteration, training.optimizer, training.scheduler, scalars,
            self._operations.at(self._counters.consumed_train_samples),
        )  # fmt: skip

    # A replay

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Prepare model and optimizer for replayed iterations; they are not logged as trained."""
        try:
            with self.operators.frozen.replaying():
                yield
        finally:
            get_moe_metrics_tracker().clear()
            MTPLossLoggingHelper.clean_metrics_in_tracker()

    def restore(self, state: bytes) -> None:
        """Put the process where the iteration after `state` starts."""
        decoded = iteration_state.decode(state)
        self.operators.restore(decoded, self._counters)
        self._recorder.put_back(decoded.scalars)

    def set_counters(self, state: bytes, validation: bytes | None = None) -> None:
        """Iteration and samples of upstream's arguments."""
        iteration_state.restore_counters(iteration_state.decode(state), self._counters)
        if validation is not None:
            last = iteration_state.decode(validation)
            self._counters.consumed_valid_samples = last.consumed_valid_samples

    def move_data(self, state: bytes) -> None:
        """Training data go on from where `state` was."""
        self._data.move_training(iteration_state.decode(state).consumed_train_samples)

    def replay(self, iteration: int, following: bytes) -> None:
        """Run an iteration with the scalars that it had reduced."""
        with self._recorder.replaying(iteration_state.decode(following).scalars):
            self.iterate(iteration)

    def recorded(self, entry: LedgerEntry) -> AbstractContextManager[None]:
        """Within it, upstream gets the scalars of `entry` instead of reducing them."""
        scalars = GlobalScalars(entry.grad_norms, entry.overflows, entry.num_tokens)
        return self._recorder.replaying(scalars)

    def count_on(self, entry: LedgerEntry) -> None:
        """The iteration of `entry` is done."""
        iteration_state.move_to(entry.iteration, entry.consumed_samples, self._counters)

    # After a failure

    def leave_loop(self) -> None:
        """Make upstream's loop enterable again."""
        self._survivor().reset_loop_state()
        self._post_step.reset_loop_state()

    def enter_loop(
        self, target: int, kept: bytes | None, entry: LedgerEntry | None, others: Sequence[bytes]
    ) -> None:
        """Have upstream's loop begin at `target`."""
        counters = self._counters
        samples = counters.consumed_train_samples if entry is None else entry.consumed_samples
        if kept is not None:
            samples = iteration_state.decode(kept).consumed_train_samples
        iteration_state.move_to(target, samples, counters)
        self._operations.base = decode_handover(others[0]).operations
        counters.num_floating_point_operations_so_far = self._operations.at(samples)
        config = get_model_config(self.operators.model[0])
        upstream.fill_first_step_caches(self.operators.optimizer, config)

    def undo_broken_iteration(self, state: bytes, began: bool) -> None:
        """Put back what an iteration that was cut off has changed."""
        self.restore(state)
        if began:
            self._survivor().put_back()
        self.move_data(state)

    def hand_over(self) -> bytes:
        """See `MegatronHandover`."""
        counters = self._counters
        return msgspec.msgpack.encode(
            MegatronHandover(
                self._post_step.progress(),
                (counters.do_train, counters.do_valid, counters.do_test),
                self._operations.base,
            )
        )

    def finish_post_step(
        self, target: int, others: Sequence[bytes], entry: LedgerEntry | None
    ) -> bool:
        """Evaluation and dense checkpoint after `target`, where any rank has not done them."""
        counters = self._counters
        self.operators.gather_parameters()
        operations = self._operations.at(counters.consumed_train_samples)
        counters.num_floating_point_operations_so_far = operations
        progress = [decode_handover(item).progress for item in others]
        grows = entry is not None and get_num_microbatches() > entry.num_microbatches
        self._post_step.catch_up(target, progress, self._data, grows)
        return not self._post_step.exits(target)

    def _survivor(self) -> BrokenIteration:
        assert self._broken is not None  # only a localized recovery asks
        return self._broken
