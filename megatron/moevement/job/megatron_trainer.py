# SPDX-License-Identifier: Apache-2.0
"""The Megatron implementation of recovery's trainer (see `moevement_ext.recover.trainer`)."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.utils import get_model_config

from megatron.moevement.facts import Counters, JobFacts
from megatron.moevement.job import placing
from megatron.moevement.job.megatron_loop import MegatronLoop, Surroundings
from megatron.moevement.seams import upstream
from megatron.moevement.seams.p2p import StagePipeline
from megatron.moevement.state import iteration_state
from megatron.moevement.state.broken_iteration import BrokenIteration
from megatron.moevement.state.dp_copy import replicas, twins
from megatron.moevement.state.expert_replicas import ExpertReplicas
from megatron.moevement.state.global_scalars import GlobalScalars, reduced_by
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.model_operators import shares_embedding
from megatron.moevement.state.resharded_state import Streams, resharded, streams_of, text_of_streams
from megatron.moevement.state.resharded_tensors import (
    ExpertDivision,
    canonical_name,
    is_of_an_expert,
)
from megatron.moevement.state.router_tokens import RouterTokenCounter
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.membership.rank import Place
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.settings import Layout, Placed, Seat
from moevement_ext.recover.reshard.index import Division
from moevement_ext.recover.trainer import Committed, Resharding

_SPARE_BYTES = 4096


class MegatronAuxiliaryState:
    """State at the start of an iteration, except tensors, as bytes: a `trainer.AuxiliaryState`.

    Training thread only.
    """

    def __init__(self, training: TrainingState, counters: Counters, around: Surroundings) -> None:
        self._training = training
        self._counters = counters
        self._recorder = around.recorder
        self._data = around.data
        self._operations = around.operations

    @property
    def max_bytes(self) -> int:
        """Upper bound of the encoded size; generator states have a fixed size."""
        longest = self.capture(0, GlobalScalars([0.1] * 64, [False] * 64))
        return len(iteration_state.encode(longest)) + _SPARE_BYTES

    def now(self) -> bytes:
        return iteration_state.encode(self.capture(self._counters.iteration, self._recorder.peek()))

    def begin(self, iteration: int) -> bytes:
        """State at the start of the iteration after `iteration`; resets the recorder."""
        return iteration_state.encode(self.capture(iteration, self._recorder.take()))

    def capture(self, iteration: int, scalars: GlobalScalars) -> IterationState:
        """State after `iteration` iterations, the last of which reduced `scalars`."""
        return iteration_state.capture(
            self._counters,
            iteration,
            self._training.optimizer,
            self._training.scheduler,
            scalars,
            self._operations.at(self._counters.consumed_train_samples),
        )

    def restore(self, state: bytes) -> None:
        decoded = iteration_state.decode(state)
        self._training.restore(decoded, self._counters)
        self._recorder.roll_back(decoded.scalars)

    def move_data(self, state: bytes) -> None:
        self._data.move_training(iteration_state.decode(state).consumed_train_samples)

    def set_counters(self, state: bytes, validation: bytes | None = None) -> None:
        iteration_state.restore_counters(iteration_state.decode(state), self._counters)
        if validation is not None:
            last = iteration_state.decode(validation)
            self._counters.consumed_valid_samples = last.consumed_valid_samples

    def count(self, iteration: int, samples: int | None, validation: int | None = None) -> None:
        """Set the numbers of iterations and samples; None keeps upstream's number of samples."""
        if validation is not None:
            self._counters.consumed_valid_samples = validation
        known = self._counters.consumed_train_samples if samples is None else samples
        iteration_state.move_to(iteration, known, self._counters)


class MegatronTrainer:
    """Model, optimizer, data and pipeline of this rank. Training thread only.

    Args:
        localized: the loop is entered again after failures of other ranks.
        placed: layout and place of this rank, if numbers describe them.
        rebalance: iterations after which experts in slots are placed again; 0: never.
    """

    def __init__(
        self,
        facts: JobFacts,
        counters: Counters,
        training: TrainingState,
        around: Surroundings,
        localized: bool,
        placed: Placed | None = None,
        rebalance: int = 0,
    ) -> None:
        self._facts = facts
        self._counters = counters
        self._recorder = around.recorder
        self._operations = around.operations
        self._losses = around.losses
        self._broken = BrokenIteration(training.model, training.operators) if localized else None
        self._step: Callable[..., object] | None = None
        self.operators = training
        self.replicas = ExpertReplicas(
            training.model, training.operators, training.states, rebalance
        )
        self.replicas.wrap(training.optimizer)
        self.auxiliary_state = MegatronAuxiliaryState(training, counters, around)
        self.pipeline = StagePipeline(facts, training.model)
        self.loop = MegatronLoop(training, counters, around, self._broken)
        self.tokens = RouterTokenCounter(training.model, training.device)
        self.resharding: Resharding | None = None
        if placed is not None:
            built = self.auxiliary_state.capture(0, GlobalScalars())
            self.resharding = MegatronResharding(placed, training, built, facts)

    @property
    def place(self) -> Place:
        """Position of this rank in upstream's layout."""
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        config = get_model_config(self.operators.model[0])
        return Place(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            members=torch.distributed.get_process_group_ranks(group),
            group=group,
            replicas=replicas(self._facts, config.variable_seq_lengths),
            interleaved=len(self.operators.model) > 1,
            twins=twins(self._facts),
        )

    @property
    def iteration(self) -> int:
        return self._counters.iteration

    @property
    def last_iteration(self) -> int:
        """`--train-iters`; upstream computes it from `--train-samples` before training."""
        assert self._counters.train_iters is not None
        return self._counters.train_iters

    @property
    def loss(self) -> float | None:
        """Loss of the newest iteration on this rank; None except on the last stage."""
        return self._losses.newest

    def use(self, train_step: Callable[..., object]) -> None:
        """Set the function that runs an iteration, called as `train_step(iteration=, **schedule)`.

        `schedule` holds keywords for upstream's pipeline schedule.
        """
        config = get_model_config(self.operators.model[0])
        self._recorder.wrap_reduction(config)
        self.replicas.install(config)  # adds the gradients as scaled, also in a replay
        self._step = train_step

    def begin_iteration(self, iteration: int) -> bytes:
        state = self.auxiliary_state.begin(iteration)
        if self._broken is not None:
            self._broken.begin()
        return state

    def undo_broken_iteration(self, state: bytes, began: bool) -> None:
        self.auxiliary_state.restore(state)
        if began:
            assert self._broken is not None  # required by localized recovery, the only caller
            self._broken.roll_back()
        self.auxiliary_state.move_data(state)

    def around_update(self, *calls: Callable[..., None]) -> None:
        self.operators.around_update(*calls)

    def iterate(self, iteration: int) -> object:
        """Run upstream's `train_step`, or the custom loop's."""
        assert self._step is not None
        self._losses.begin()
        self.replicas.begin(iteration)
        return self._step(iteration=iteration, **self.pipeline.schedule(iteration))

    def record(self, iteration: int, skipped: bool) -> Committed:
        """Auxiliary state and ledger entry after the update that led to `iteration`.

        Upstream steps the scheduler and counts samples later, after the reductions for its log; a
        failure in those reductions must not undo the iteration. So both are computed here.
        """
        num_microbatches = get_num_microbatches()
        samples = self._facts.data_parallel_size * self._facts.micro_batch_size * num_microbatches
        state = self.auxiliary_state.capture(iteration, self._recorder.peek())
        state.consumed_train_samples += samples
        state.skipped_train_samples += iteration_state.skipped_samples()
        state.floating_point_operations = self._operations.at(state.consumed_train_samples)
        state.scheduler_steps += 0 if skipped else samples
        if not skipped:  # else the scheduler does not step, and the weight decay stays
            iteration_state.forget_weight_decay(state)
        entry = LedgerEntry(
            iteration=iteration,
            grad_norms=state.scalars.grad_norms,
            overflows=state.scalars.overflows,
            num_microbatches=num_microbatches,
            consumed_samples=state.consumed_train_samples,
            num_tokens=state.scalars.num_tokens,
            loss=self.loss,
            consumed_valid=state.consumed_valid_samples,
        )
        begins_window = self.replicas.rebalances(iteration)
        return Committed(iteration_state.encode(state), entry, begins_window)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Prepare model and optimizer for a replay, and drop the metrics that it collects."""
        try:
            with self.operators.frozen.replaying():
                yield
        finally:
            upstream.clear_metrics()

    def reduced(self, known: LedgerEntry | bytes) -> AbstractContextManager[None]:
        """Give upstream the known scalars within the context, instead of reducing them."""
        if isinstance(known, LedgerEntry):
            scalars = GlobalScalars(known.grad_norms, known.overflows, known.num_tokens)
        else:
            scalars = iteration_state.decode(known).scalars
            self._recorder.roll_back(GlobalScalars())  # in a conversion no step takes the record
        return self._recorder.replaying(scalars)


class MegatronResharding:
    """Names and auxiliary state of this rank. Training thread only.

    `built` is the auxiliary state before any random draw or optimizer step.
    """

    def __init__(
        self, placed: Placed, training: TrainingState, built: IterationState, facts: JobFacts
    ) -> None:
        self._layout = placed.layout
        self._seat = placed.seat
        self._training = training
        self._built = built
        self._facts = facts
        self._shared = shares_embedding(training.model)
        self._seats: Mapping[int, Seat] = {}
        self._shards_before = self._layout.expert_tensor
        self._config = config = get_model_config(training.model[0])
        gated, shards = config.gated_linear_unit, self._layout.expert_tensor
        self._experts = ExpertDivision(training.operators, shards, gated)

    def refuse(self, was: Layout) -> None:
        placing.refuse(
            was,
            self._layout,
            interleaved=self._config.moe_mlp_glu_interleave_size is not None,
            own_data=self._facts.has_data_of_each_rank,
        )

    def name_of(self, operator: str, tensor: str, seat: Seat) -> str:
        """Name in the whole model, and the tensor-parallel shard if the layouts divide equally."""
        name = canonical_name(operator, tensor, self._shared)
        shard = seat.tensor
        if is_of_an_expert(operator):
            shard = 0 if self._redivides else seat.expert_tensor
        return f'{name} of shard {shard}' if shard else name

    @property
    def _redivides(self) -> bool:
        """True if the layouts differ in their expert tensor parallel size."""
        return self._shards_before != self._layout.expert_tensor

    def division_of(self, operator: str, part: str, tensor: str, owner: int | None) -> Division:
        if not self._redivides:
            return Division()
        seat, shards = self._seat, self._layout.expert_tensor
        if owner is not None:
            seat, shards = self._seats[owner], self._shards_before
        return self._experts.of(operator, part, tensor, shards, seat.expert_tensor)

    def state_owners(self, seats: Mapping[int, Seat]) -> Collection[int]:
        """Owners of this rank's random numbers; and each stage's first owner, for its groups."""
        self._seats = seats
        self._shards_before = 1 + max(seat.expert_tensor for seat in seats.values())
        first = {seat.pipeline: owner for owner, seat in sorted(seats.items(), reverse=True)}
        streams = self._streams()
        return {*first.values(), *(owner for owner in streams if owner is not None)}

    def auxiliary_state(self, states: Mapping[int, bytes]) -> bytes:
        return iteration_state.encode(
            resharded(
                {owner: iteration_state.decode(state) for owner, state in states.items()},
                self._streams(),
                get_expert_parallel_rng_tracker_name(),
                self._built,
                reduced_by(self._training.optimizer, self._config),
            )
        )

    def _streams(self) -> Streams:
        return streams_of(self._seat, self._seats, self._facts.data_parallel_random_init)

    def kept(self, was: Layout) -> str:
        return text_of_streams(was, self._layout)
