# SPDX-License-Identifier: Apache-2.0
"""Plans the windows of a stage from the bytes of every operator on each of its ranks.

The first rank of a stage plans its windows. A rank that joins a running job plans them too, as it
may replace the first rank. Little data of other stages is needed; the inputs of all plans enter the
digest of the window.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, islice, zip_longest

import msgspec
import xxhash
from torch.distributed import Store

from moevement_ext.capture.layout import Operators, TensorSlice, operator_table
from moevement_ext.membership.rank import Place, Rank
from moevement_ext.memory.budget import stub_file_bytes, window_file_bytes
from moevement_ext.memory.window import settings, slot
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.memory.window.twin import OwnParts, stub_capacity
from moevement_ext.plan.byte_planner import OperatorTable, balanced, window_bytes_bound
from moevement_ext.plan.popularity import order_by_popularity
from moevement_ext.plan.replanning import Cycle, PlanParameters
from moevement_ext.plan.windows import Budgets, Need, needs, shortest
from moevement_ext.protect.replanner import hand_out, handed_out, packed, published, unpacked

_NEEDS = msgspec.msgpack.Decoder(list[Need])


class _RankOperators(msgspec.Struct, frozen=True):
    """Bytes captured of each operator on one rank, in full and as compute weights."""

    sizes: dict[str, tuple[int, int]]
    kinds: dict[str, str]
    tied: list[str]
    always: int
    """Bytes of other data in every slot."""


_OPERATORS = msgspec.msgpack.Decoder(_RankOperators)


class _RankSummary(msgspec.Struct, frozen=True):
    """Summary of one rank for the ranks of all stages: a few bytes for any model."""

    stage: int
    operators: str
    """Digest of its `_RankOperators`."""
    tied: bool
    """True if the rank holds weights shared with other stages."""
    family: int
    """Lowest rank with the same state."""
    names: int
    """Bytes of all operator names of the stage; set by the stage's first rank."""


_SUMMARY = msgspec.msgpack.Decoder(_RankSummary)


class Planner:
    """Plans the windows of this rank's stage. Collective construction.

    The cost grows with the operators on the ranks of one stage, not with the number of stages.
    `place` is this rank's place in the layout.
    """

    def __init__(self, rank: Rank, operators: Operators, place: Place) -> None:
        own = _RankOperators(
            sizes={
                name: (item.full_bytes, item.weight_bytes)
                for name, item in operators.slices.items()
            },
            kinds=dict(operators.kinds),
            tied=list(operators.tied),
            always=sum(item.always_bytes for item in operators.slices.values()),
        )
        encoded = msgspec.msgpack.encode(own)
        self.place = place
        self._rank = rank
        self._own = own
        self._operators_held = operators
        self.is_first = rank.number == place.members[0]
        gathered = rank.exchange.among('operators', encoded, place.members, place.group)
        # Operators of the stage's ranks; empty if another rank plans the stage.
        self._members: list[_RankOperators] = []
        if self.is_first or rank.exchange.joining:
            self._members = [_OPERATORS.decode(item) for item in gathered]
        names = {name for member in self._members for name in member.sizes}
        summary = _RankSummary(
            stage=place.stage,
            operators=xxhash.xxh3_64_hexdigest(encoded),
            tied=bool(own.tied),
            family=min([rank.number, *place.replicas]),
            names=sum(len(name) + 5 for name in names),
        )
        self._ranks = [
            _SUMMARY.decode(item)
            for item in rank.exchange('ranks', msgspec.msgpack.encode(summary))
        ]
        # Needs of windows, by stage and length.
        self._needs: list[list[Need]] = []

    @property
    def stage_of(self) -> list[int]:
        return [rank.stage for rank in self._ranks]

    @cached_property
    def replicas(self) -> list[list[int]]:
        """Ranks with the same state, by rank."""
        families: dict[int, list[int]] = {}
        for rank, summary in enumerate(self._ranks):
            families.setdefault(summary.family, []).append(rank)
        return [
            [other for other in families[summary.family] if other != rank]
            for rank, summary in enumerate(self._ranks)
        ]

    @property
    def tied(self) -> frozenset[int]:
        """Stages that share weights: the first and the last one, for the embedding."""
        return frozenset(rank.stage for rank in self._ranks if rank.tied)

    def first_plan(self, parameters: PlanParameters) -> Cycle:
        """The plan of a new job, from iteration 0. Collective, except when joining."""
        if self._rank.exchange.joining:
            return self.plan(parameters)
        own = packed(self.plan(parameters)) if self.is_first else b''
        place = self.place
        return unpacked(self._rank.exchange.from_first(own, place.members, place.group))

    def plan(self, parameters: PlanParameters) -> Cycle:
        """Compute the plan of this stage. Only on its first rank or on a joining rank.

        The digest covers the planning inputs of all stages, so that windows of different
        plans never count as one. Experts without a share keep their order.
        """
        shares, window = parameters.shares, parameters.window
        table = self._table(shares)
        everything = [[rank.operators for rank in self._ranks], window, sorted(shares.items())]
        everything += [parameters.idle] if parameters.idle else []
        everything += [parameters.experts] if parameters.experts else []
        everything += [sorted(parameters.by_stage.items())] if parameters.by_stage else []
        return Cycle(
            origin=parameters.origin,
            plan=balanced(table, window),
            digest=xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(everything)),
            version=parameters.version,
            idle=parameters.idle,
            experts=parameters.experts_of(self.place.stage),
            shares={name: shares[name] for name in table.names if name in shares},
            lost=parameters.lost,
        )

    def announced_plan(self, version: int, store: Store) -> Cycle:
        """Compute an announced plan; the stage's first rank also hands it out in `store`."""
        plan = self.plan(published(store, version))
        if self.is_first:
            hand_out(store, self.place.stage, plan)
        return plan

    def next_plan(self, version: int, store: Store) -> Cycle | None:
        """An announced plan; None if the stage's first rank has not handed it out yet.

        Runs on the replanner's thread; `store` is that of the replanners.
        """
        if self.is_first:
            return self.announced_plan(version, store)
        return handed_out(store, self.place.stage, version)

    def compare_windows(self, longest: int) -> None:
        """Prepare `shortest_window` for windows of up to `longest` slots. Collective."""
        own: list[Need] = []
        if self.is_first and not self._rank.exchange.joining:
            always = max(member.always for member in self._members)
            own = list(islice(needs(self._table({}), always), longest))
        encoded = self._rank.exchange('window-needs', msgspec.msgpack.encode(own))
        decoded = (_NEEDS.decode(item) for item in encoded)
        self._needs = [found for found in decoded if found]

    def shortest_window(self, budgets: Budgets, longest: int) -> int | None:
        """The fewest slots, up to `longest`, that the links sustain on every rank of every stage.

        Assumes the operators' initial order. None if more are needed.
        """
        return shortest(self._needs, budgets, longest)

    def capacity(self, window: int, context_bytes: int) -> int:
        """Return bytes that suffice for this rank's window file under any plan of up to W slots."""
        operators = operator_table(list(self._own.sizes), [self._own.sizes])
        payload = int(window_bytes_bound(operators, window)[0]) + window * self._own.always
        frame = slot.frame_bytes_bound(self._largest_header(window, context_bytes))
        frames = ((0, frame) for _ in range(window))
        needed = window_capacity([(payload, settings.MAX_BYTES), *frames])
        return window_file_bytes(self._state_bytes(window), window, needed)

    def stub_capacity(self, window: int, context_bytes: int) -> int:
        """Return bytes that suffice for the stub of any such window (see `window.twin`)."""
        header = self._largest_header(window, context_bytes)
        needed = stub_capacity(header, self.own_parts, settings.MAX_BYTES)
        return stub_file_bytes(self._state_bytes(window), window, needed)

    def slot_bytes(self, window: int) -> int:
        """Return the mean bytes of state per slot in a window of W slots."""
        return self._state_bytes(window) // window

    @property
    def own_parts(self) -> OwnParts:
        """Tensor and part of captured data that may differ between ranks with the same state."""
        held = self._operators_held.slices.values()
        parts = (item for operator in held for kind in operator for item in kind)
        return frozenset((item.tensor, item.part) for item in parts if item.volatile)

    @property
    def family(self) -> int:
        """Lowest rank among this one and those that capture the same state."""
        return min([self._rank.number, *self.place.twins])

    def _state_bytes(self, window: int) -> int:
        """Return bytes of weights and optimizer state in a window, as sized before training."""
        held = self._operators_held.slices.values()
        full = sum(item.nbytes for operator in held for item in operator.full if _is_state(item))
        weights = sum(
            item.nbytes for operator in held for item in operator.weights if _is_state(item)
        )
        return full + (window - 1) * weights

    def _table(self, shares: Mapping[str, float]) -> OperatorTable:
        """Operators of this stage in capture order, with their bytes on each of its ranks."""
        names = self._ordered(self._members, shares)
        return operator_table(names, [member.sizes for member in self._members])

    @staticmethod
    def _ordered(members: Sequence[_RankOperators], popularity: Mapping[str, float]) -> list[str]:
        """Tied operators first, then experts, then the rest.

        All ranks that share tied operators thaw them together. Experts are taken from the
        ranks in turn, so that every slot loads all ranks, and from each rank by ascending
        popularity: the slowest rank bounds a replay, so each freezes its own popular experts.
        """
        tied = chain.from_iterable(member.tied for member in members)
        of_rank = [
            order_by_popularity(
                [name for name, kind in member.kinds.items() if kind == 'expert'], popularity
            )
            for member in members
        ]
        experts = [name for turn in zip_longest(*of_rank) for name in turn if name is not None]
        others = chain.from_iterable(
            (name for name, kind in member.kinds.items() if kind != 'expert') for member in members
        )
        return list(dict.fromkeys([*tied, *experts, *others]))

    def _largest_header(self, window: int, context_bytes: int) -> slot.SlotHeader:
        """Return a header with all records of this rank, in full and as weights."""
        records = [
            slot.Record(
                operator=part.operator,
                tensor=part.tensor,
                part=part.part,
                dtype='bfloat16',
                start=part.start,
                end=part.end,
                offset=0,
                nbytes=0,
            )
            for item in self._operators_held.slices.values()
            for part in (*item.full, *item.weights, *item.always)
        ]
        names = max(rank.names for rank in self._ranks if rank.stage == self.place.stage)
        return slot.SlotHeader(
            version=slot.FORMAT_VERSION,
            run='0' * 16,
            topology='0' * 16,
            owner=0,
            start=0,
            window=window,
            slot=0,
            iteration=0,
            plan='0' * 33,
            payload_bytes=0,
            records=records,
            context=bytes(context_bytes + names + slot.LOSS_BYTES),
            placed=self._rank.identity.placed,
        )


def _is_state(item: TensorSlice) -> bool:
    """Return False for step counts, router buffers and weight scales."""
    return item.part not in ('step', 'buffer', 'weight_scale')
