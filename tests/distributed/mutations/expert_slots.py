# SPDX-License-Identifier: Apache-2.0
"""Ways to break slots for experts. Every one must turn the bits red."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.moevement.job.megatron_trainer import MegatronTrainer
from megatron.moevement.seams import expert_slots
from megatron.moevement.state import training_state
from megatron.moevement.state.expert_replicas import ExpertReplicas
from megatron.moevement.state.model_operators import Operator


def own_tokens_not_first() -> None:
    """All tokens fill the room of the ranks in turn, as those that are left over do."""

    def in_turn(counts: torch.Tensor, held: torch.Tensor, rank: int) -> torch.Tensor:
        ends = held.cumsum(0) * counts.sum(0) // held.sum(0)
        room = ends.diff(dim=0, prepend=torch.zeros_like(ends[:1]))
        last = counts.cumsum(0)[rank]
        begins = torch.maximum(last - counts[rank], ends - room)
        return (torch.minimum(last, ends) - begins).clamp(min=0)

    expert_slots.sent = in_turn


def sum_not_in_order() -> None:
    """Each holder begins with its own gradient."""
    add, of_holders = ExpertReplicas.add_gradients, ExpertReplicas._of_holders

    def own_first(self: Any, own: Any) -> Iterator[list[torch.Tensor]]:
        for mine, parts in zip(own, of_holders(self, own), strict=True):
            yield [mine, *(part for part in parts if part is not mine)]

    def adding(self: Any) -> None:
        self._of_holders = lambda own: own_first(self, own)
        add(self)
        del self._of_holders

    ExpertReplicas.add_gradients = adding  # type: ignore[method-assign]


def replica_counted_twice_in_the_norm() -> None:
    ExpertReplicas._count_once = lambda self: None  # type: ignore[method-assign]


def window_goes_across_a_rebalance() -> None:
    """Windows do not begin where experts move."""
    record = MegatronTrainer.record

    def without_boundary(self: Any, *given: Any) -> Any:
        return record(self, *given)._replace(begins_window=False)

    MegatronTrainer.record = without_boundary  # type: ignore[method-assign]


def moments_stay_behind() -> None:
    """A rebalance moves weights and masters only."""
    bytes_of, move = ExpertReplicas._bytes_of, ExpertReplicas._move

    def moving(self: Any, slots: Any, size: int, *given: Any) -> int:
        self._bytes_of = lambda slot: [
            part for at, part in enumerate(bytes_of(self, slot)) if at % 4 < 2
        ]
        size = sum(part.numel() for part in self._bytes_of(slots[0]))
        sends = move(self, slots, size, *given)
        del self._bytes_of
        return sends

    ExpertReplicas._move = moving  # type: ignore[method-assign]


def placement_left_out_of_windows() -> None:
    """A process that starts again has the experts where the job began with them."""
    inventory = training_state.operator_inventory

    def without_placement(model: Any) -> dict[str, Operator]:
        operators = inventory(model)
        for one in operators.values():
            kept = [name for name in one.buffers if not name.endswith('.placement')]
            one.buffers = {name: one.buffers[name] for name in kept}
        return operators

    training_state.operator_inventory = without_placement
