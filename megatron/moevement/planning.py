# SPDX-License-Identifier: Apache-2.0
"""Gives the planner what it needs: bytes of every operator on every rank, stage by stage."""

from collections.abc import Mapping
from itertools import chain, zip_longest
from typing import Any

import msgspec
import xxhash
from megatron.core import parallel_state

from megatron.moevement.exchange import Exchange
from megatron.moevement.training_state import TrainingState
from megatron.moevement.twins import twins
from moevement_ext.capture.layout import operator_bytes
from moevement_ext.checkpointer import ScheduledPlan
from moevement_ext.memory.slot import FORMAT_VERSION, Record, SlotHeader, frame_bytes_bound
from moevement_ext.memory.window_format import window_capacity
from moevement_ext.plan.ordering import order_by_popularity
from moevement_ext.plan.window import (
    OperatorBytes,
    plan_stages,
    window_bytes_bound,
)


class RankOperators(msgspec.Struct, frozen=True):
    """What one rank holds: bytes captured of each operator, in full and as compute weights."""

    stage: int
    sizes: dict[str, tuple[int, int]]
    kinds: dict[str, str]
    tied: list[str]
    twins: list[int]
    """Ranks that hold the same state."""


class Planner:
    """Plans the windows of all stages; every rank computes the same. Collective construction."""

    def __init__(self, training: TrainingState, exchange: Exchange, args: Any) -> None:
        slices = training.slices
        own = RankOperators(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            sizes={name: (item.full_bytes, item.light_bytes) for name, item in slices.items()},
            kinds={name: operator.kind for name, operator in training.operators.items()},
            tied=training.tied,
            twins=twins(args),
        )
        encoded = exchange('operators', msgspec.msgpack.encode(own))
        self._ranks = [msgspec.msgpack.decode(item, type=RankOperators) for item in encoded]
        self._own = own
        self._training = training

    @property
    def stage_of(self) -> list[int]:
        """Pipeline stage by rank."""
        return [rank.stage for rank in self._ranks]

    @property
    def twins(self) -> list[list[int]]:
        """Ranks that hold the same state, by rank."""
        return [rank.twins for rank in self._ranks]

    @property
    def tied(self) -> bool:
        """First and last stage share the embedding's weights."""
        return any(rank.tied for rank in self._ranks)

    def stages(self, popularity: Mapping[str, float]) -> list[list[OperatorBytes]]:
        """Operators of every stage in capture order, with their bytes on each of its ranks."""
        numbers = sorted({rank.stage for rank in self._ranks})
        return [self._stage(number, popularity) for number in numbers]

    def schedule(
        self,
        origin: int,
        window: int | None,
        budget: int,
        popularity: Mapping[str, float],
    ) -> ScheduledPlan:
        """The plan of this rank's stage from iteration `origin` on.

        Args:
            window: W, or None for the shortest that is within `budget` on every rank.
            budget: bytes per rank and iteration that can be hidden.
            popularity: share of tokens by expert operator; unknown ones keep their order.

        Raises:
            InfeasiblePlan: no window is within the budget.
        """
        plans = plan_stages(self.stages(popularity), window=window, budget=budget)
        digest = xxhash.xxh3_64_hexdigest('/'.join(plan.digest() for plan in plans).encode())
        return ScheduledPlan(origin, plans[self._own.stage], digest)

    def capacity(self, window: int, context_bytes: int) -> int:
        """Bytes of a window file of this rank that suffice for any plan of up to W slots."""
        operators = operator_bytes(list(self._own.sizes), [self._own.sizes])
        payload = window_bytes_bound(operators, window)[0]
        frame = frame_bytes_bound(self._largest_header(window, context_bytes))
        return window_capacity([(payload, 0), *((0, frame) for _ in range(window))])

    def dense_bytes(self) -> int:
        """Bytes of a dense capture on this rank: every operator in full."""
        return sum(full for full, _ in self._own.sizes.values())

    def _stage(self, number: int, popularity: Mapping[str, float]) -> list[OperatorBytes]:
        members = [rank for rank in self._ranks if rank.stage == number]
        names = self._ordered(members, popularity)
        return operator_bytes(names, [member.sizes for member in members])

    @staticmethod
    def _ordered(members: list[RankOperators], popularity: Mapping[str, float]) -> list[str]:
        """Tied operators first (all ranks that share them thaw them together), experts next,
        turn by turn over the ranks so that every slot loads all of them, the rest last."""
        tied = list(dict.fromkeys(name for member in members for name in member.tied))
        of_rank = [
            [name for name, kind in member.kinds.items() if kind == 'expert'] for member in members
        ]
        experts = [name for turn in zip_longest(*of_rank) for name in turn if name is not None]
        others = chain.from_iterable(
            (name for name, kind in member.kinds.items() if kind != 'expert') for member in members
        )
        names = dict.fromkeys([*experts, *others])
        known = {name: share for name, share in popularity.items() if name in names}
        untied = [name for name in names if name not in tied]
        ordered_experts = order_by_popularity(untied, known) if known else untied
        return [*tied, *ordered_experts]

    def _largest_header(self, window: int, context_bytes: int) -> SlotHeader:
        """A header with every record of this rank, in full and light."""
        records = [
            Record(part.operator, part.tensor, part.part, 'bfloat16', part.start, part.end, 0, 0)
            for item in self._training.slices.values()
            for part in (*item.full, *item.light)
        ]
        names = sum(len(name) + 5 for name in self._all_names())
        return SlotHeader(
            version=FORMAT_VERSION, run='0' * 16, topology='0' * 16, owner=0, start=0,
            window=window, slot=0, iteration=0, plan='0' * 16, payload_bytes=0, records=records,
            context=bytes(context_bytes + names),
        )  # fmt: skip

    def _all_names(self) -> set[str]:
        return {
            name for rank in self._ranks if rank.stage == self._own.stage for name in rank.sizes
        }
