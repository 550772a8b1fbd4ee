# SPDX-License-Identifier: Apache-2.0
"""Ways to break slots for experts. Every one must turn the bits red."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.moevement.seams import expert_slots
from megatron.moevement.state.expert_replicas import ExpertReplicas


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
