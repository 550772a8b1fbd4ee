# SPDX-License-Identifier: Apache-2.0
"""Megatron state for a job in another layout (see `recover.trainer.Resharding`)."""

from collections.abc import Collection, Mapping

from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.utils import get_model_config

from megatron.moevement.facts import JobFacts
from megatron.moevement.job import placing
from megatron.moevement.state import iteration_state
from megatron.moevement.state.canonical import canonical_name
from megatron.moevement.state.expert_division import ExpertDivision, is_of_an_expert
from megatron.moevement.state.global_scalars import reduced_by
from megatron.moevement.state.iteration_state import IterationState
from megatron.moevement.state.model_operators import shares_embedding
from megatron.moevement.state.resharded_state import Streams, resharded, streams_of, told_streams
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.memory.window.placed import Layout, Placed, Seat
from moevement_ext.recover.reshard.index import Division


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
        return told_streams(was, self._layout)
