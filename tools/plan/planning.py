# SPDX-License-Identifier: Apache-2.0
"""The complete plan of a job: window, exposed time, traffic, memory, recovery and ETTR.

Windows come from the planner that training uses; stages with equal bytes are planned once.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from moevement_ext.config import AUTO, LONGEST_WINDOW, SparseCheckpointConfig
from moevement_ext.memory.budget import NOTHING_LOGGED, HostMemoryPlan, Logged, window_lengths
from moevement_ext.plan.byte_planner import (
    DEFAULT_HIDDEN_FRACTION,
    InfeasiblePlan,
    OperatorTable,
    WindowPlan,
    balanced,
    bytes_over_budget,
    fewest_slots,
)
from moevement_ext.plan.strategy.moevement import FIRST_WINDOW
from moevement_ext.plan.windows import (
    DEFAULT_NETWORK_SHARE,
    Budgets,
    budgets,
    held_to,
    needs,
    shortest,
)

from ..lab.fields import Count, NotNegative, Part, Positive, PositiveOrInfinite, Share
from ..model.algorithm1 import plan_as_printed
from ..model.description import Cluster
from ..model.layout import Batch, Layout, Precision
from ..model.shape import ModelShape
from ..model.sizes import held_elements, operator_sizes, scaling_bytes, stage_kind
from ..simulate.closed_form import Sparse
from . import memory

# Limit of the search for windows beyond the allowed ones, to report a feasible length.
_LONGEST_SOUGHT = 64
_RULE = f'give auto, or a whole number from 1 to {LONGEST_WINDOW}'
Window = Annotated[int, msgspec.Meta(ge=1, le=LONGEST_WINDOW, description=_RULE)]


class ProtectionSettings(msgspec.Struct, frozen=True):
    """Settings of sparse checkpointing; defaults are those of the training's flags."""

    window: Window | Literal['auto'] = 'auto'
    """Iterations; auto: the fewest that the links can carry."""
    max_window: Window = 8
    """Longest window of `auto`; host memory is reserved for it."""
    replicas: Count = 2
    recovery: Literal['auto', 'localized', 'global', 'whole-job'] = 'localized'
    hidden_fraction: Part = DEFAULT_HIDDEN_FRACTION
    """Share of an iteration that can hide a copy."""
    network_share: Part = DEFAULT_NETWORK_SHARE
    """Share of a node's network for replication; training uses the rest."""
    network_gb_per_s: float | Literal['auto', 'off'] = 'auto'
    """The flag `--sparse-ckpt-network-gb-per-s`: a rate per rank, which replaces the share."""
    log_lag: NotNegative = SparseCheckpointConfig.log_lag
    """Iterations until a window is persisted, which the log has space for."""
    disk: str | None = None

    def __post_init__(self) -> None:
        _ = self.network_bytes_per_s  # which the training's configuration checks

    @property
    def localized(self) -> bool:
        """True if all sends between stages are logged, so that a lost stage replays alone."""
        return self.recovery in (AUTO, 'localized')

    @property
    def network_bytes_per_s(self) -> float | None:
        """Limit of a rank's replication; None: a share of the link."""
        return SparseCheckpointConfig(network_gb_per_s=self.network_gb_per_s).network_bytes_per_s

    @property
    def fixed_window(self) -> int | None:
        return self.window if isinstance(self.window, int) else None

    @property
    def longest_window(self) -> int:
        """Iterations that host memory is reserved for, if available."""
        return self.fixed_window or self.max_window


class FailureRate(msgspec.Struct, frozen=True):
    """Failures of the job, and the duration of a recovery without its replay."""

    mtbf_s: PositiveOrInfinite = math.inf
    restart_s: NotNegative = 30.0
    local_saving: Share = 0.0
    """Share of a replayed iteration that is saved because only the lost stage computes."""
    frozen_saving: Share = 0.0


class Job(msgspec.Struct, frozen=True):
    """All inputs of a plan."""

    model: ModelShape
    layout: Layout
    batch: Batch
    cluster: Cluster
    iteration_s: Positive
    precision: Precision = Precision()
    protection: ProtectionSettings = ProtectionSettings()
    failures: FailureRate = FailureRate()
    overhead_s: NotNegative = 0.0
    """Measured seconds added to each iteration, besides the computed exposed time."""

    @property
    def ranks_per_node(self) -> int:
        return min(self.cluster.gpus_per_node, self.layout.ranks)

    @property
    def send_bytes_per_s(self) -> float:
        """Average limit of a rank's replication traffic."""
        link, settings = self.cluster.network_bytes_per_s / self.ranks_per_node, self.protection
        return held_to(link, settings.network_share, settings.network_bytes_per_s) or link

    @property
    def nodes(self) -> int:
        return -(-self.layout.ranks // self.ranks_per_node)

    @property
    def copies(self) -> int:
        return min(self.protection.replicas, self.nodes - 1)


class StageKind(msgspec.Struct, frozen=True):
    """Stages with equal bytes, and their window. Slots are those of the first such stage."""

    stages: list[int]
    operators: OperatorTable
    plan: WindowPlan
    held_parameters: int
    """Number of parameters that a rank computes with."""
    logged: Logged
    always: int = 0
    """Bytes of each rank in every slot, independent of the captured operators."""

    def slot_bytes(self) -> np.ndarray:
        """Bytes, int64 (window, ranks of a stage)."""
        return self.plan.slot_bytes(self.operators) + self.always

    def rank_bytes(self) -> tuple[int, int]:
        """Bytes of the largest rank, with all operators full and all weights."""
        full, weights = self.operators.full.sum(axis=0), self.operators.weights.sum(axis=0)
        return int(full.max()), int(weights.max())


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Results for one job; see the properties."""

    job: Job
    budgets: Budgets
    kinds: list[StageKind]
    fewest: int | None
    """Shortest window that the links can carry; None: none, or an extremely long one."""
    fewest_by_copy: int | None
    printed_window: int
    """Window of the paper's Algorithm 1 for the same operators and budget."""
    printed_over: int
    """Bytes of its largest slot beyond the budget."""
    longest: int

    @property
    def limited_by(self) -> str:
        """`copy` or `network`: the link that determines the window."""
        return 'copy' if self.fewest == self.fewest_by_copy else 'network'

    @property
    def window(self) -> int:
        return self.kinds[0].plan.window

    def exposed_s(self) -> np.ndarray:
        """Seconds that each slot's copy adds to its iteration, float64 (window,)."""
        largest = np.max([kind.slot_bytes().max(axis=1) for kind in self.kinds], axis=0)
        over = np.maximum(largest - self.budgets.copy_bytes, 0)
        seconds: np.ndarray = over / self.job.cluster.copy_bytes_per_s
        return seconds

    def _busiest_node(self, values: Sequence[np.ndarray]) -> float:
        """Largest sum over the ranks of a node, given values (ranks of a stage,) of each kind."""
        of_ranks = per_rank(self.job.layout, self.kinds, values)
        nodes = np.arange(len(of_ranks)) // self.job.ranks_per_node
        return float(np.bincount(nodes, weights=of_ranks).max())

    def replicated_bytes(self) -> float:
        """Bytes that the busiest node sends per iteration, mean over the window."""
        means = [kind.slot_bytes().mean(axis=0) for kind in self.kinds]
        return self.job.copies * self._busiest_node(means)

    def queued(self, kind: StageKind) -> np.ndarray:
        """Bytes that wait for transmission after each slot, int64 (window, ranks of a stage).

        Assumes the average pace of replication. The bytes wait in the file of their window, which
        is part of the reserved host memory.
        """
        slots = kind.slot_bytes()
        offered = self.budgets.network_bytes
        if offered is None:
            return np.zeros_like(slots)
        for before, slot in itertools.pairwise(slots):
            slot += np.maximum(before - offered, 0)
        return slots

    def queue_bytes(self) -> int:
        return max(int(self.queued(kind).max()) for kind in self.kinds)

    def network_bytes(self) -> float:
        return self.job.send_bytes_per_s * self.job.ranks_per_node * self.job.iteration_s

    def log_bytes_of_node(self) -> int:
        return int(self._busiest_node([np.array(one.logged.iteration_bytes) for one in self.kinds]))

    def host_memory(self, longest_window: int | None = None) -> HostMemoryPlan:
        """Memory of the node that needs most, for a longest window; None: as training reserves."""
        return _host_memory(self.job, self.kinds, longest_window or self.longest)

    def taken_bytes(self) -> int:
        """Bytes of this memory that the node reserves at first; longer windows take more later."""
        window = self.window
        if self.job.protection.fixed_window is None:
            window = max(window, min(self.longest, FIRST_WINDOW))
        return self.host_memory(window).node_total

    def effectiveness(self) -> Sparse:
        return Sparse(
            iteration_s=self.job.iteration_s,
            period=self.window,
            overhead_s=self.job.overhead_s + float(self.exposed_s().mean()),
            **msgspec.structs.asdict(self.job.failures),
        )


def iteration_seconds(
    model: ModelShape, layout: Layout, batch: Batch, cluster: Cluster, mfu: float
) -> float:
    """Seconds of an iteration, given the model FLOPs utilization in (0, 1]."""
    flops = model.flops_per_token(batch.sequence_length) * batch.tokens
    return flops / (layout.ranks * cluster.peak_flops * mfu)


def hidden_budgets(job: Job) -> Budgets:
    """Bytes that the links of a rank carry during the computation of an iteration."""
    settings = job.protection
    return budgets(
        job.iteration_s,
        job.cluster.copy_bytes_per_s,
        job.cluster.network_bytes_per_s / job.ranks_per_node,
        job.copies,
        settings.hidden_fraction,
        settings.network_share,
        settings.network_bytes_per_s,
    )


def plan_job(job: Job) -> JobPlan:
    """Plan all stages with one window.

    Raises:
        InfeasiblePlan: the planner chooses the window, and the copy of a single operator takes
            too long; a note names the stage.
        FieldError: model, layout and batch do not fit together.
    """
    job.batch.micro_batches(job.layout.data)
    carried = hidden_budgets(job)
    groups = _equal_stages(job)
    stages = [operator_sizes(job.model, job.layout, job.precision, group[0]) for group in groups]
    always = [scaling_bytes(job.model, job.layout, job.precision, group[0]) for group in groups]
    planned = [_with_always(*pair) for pair in zip(stages, always, strict=True)]

    def kinds_of(window: int) -> list[StageKind]:
        plans = [balanced(operators, window) for operators in stages]
        return [_stage_kind(job, *one) for one in zip(groups, stages, plans, always, strict=True)]

    longest = _longest_that_fits(job, kinds_of(1))
    window, fewest, by_copy = job.protection.fixed_window, None, None
    try:
        by_copy = _fewest(planned, groups, carried.copy_bytes)
    except InfeasiblePlan:
        if window is None:
            raise
    else:
        found = [needs(*stage) for stage in zip(stages, always, strict=True)]
        fewest = shortest(found, carried, max(_LONGEST_SOUGHT, job.protection.longest_window))
    if window is None:
        window = min(fewest or LONGEST_WINDOW, longest)
    printed = [plan_as_printed(operators, carried.bytes) for operators in planned]
    over = (bytes_over_budget(*one, carried.bytes) for one in zip(printed, planned, strict=True))
    return JobPlan(
        job=job,
        budgets=carried,
        kinds=kinds_of(window),
        fewest=fewest,
        fewest_by_copy=by_copy,
        printed_window=max(plan.window for plan in printed),
        printed_over=max(over),
        longest=longest,
    )


def per_rank(
    layout: Layout, kinds: Sequence[StageKind], values: Sequence[np.ndarray]
) -> np.ndarray:
    """Values by global rank, from the values (ranks of a stage,) of each kind of stage."""
    by_stage = [np.empty(0)] * layout.pipeline
    for kind, value in zip(kinds, values, strict=True):
        for stage in kind.stages:
            by_stage[stage] = np.broadcast_to(value, layout.stage_ranks)
    return np.concatenate(by_stage)


def _host_memory(job: Job, kinds: Sequence[StageKind], longest: int) -> HostMemoryPlan:
    files = [memory.window_files(kind.operators, longest, kind.always) for kind in kinds]
    stubs = [memory.stub_files(kind.operators, longest) for kind in kinds]
    rings = memory.log_rings([kind.logged for kind in kinds], longest, job.protection.log_lag)
    return memory.fullest_node(
        per_rank(job.layout, kinds, files),
        per_rank(job.layout, kinds, stubs),
        per_rank(job.layout, kinds, [np.array(ring) for ring in rings]),
        job.layout.families(),
        job.ranks_per_node,
        job.protection.replicas,
        job.protection.disk is not None,
    )


def _longest_that_fits(job: Job, kinds: Sequence[StageKind]) -> int:
    """Longest W that fits into host memory, by the rule of training before iteration 1."""
    if job.protection.fixed_window is not None:
        return job.protection.fixed_window
    lengths = window_lengths(job.protection.max_window)

    def too_long(length: int) -> bool:
        return _host_memory(job, kinds, length).node_total > job.cluster.host_memory_bytes

    return lengths[max(bisect_left(lengths, True, key=too_long) - 1, 0)]


def _with_always(operators: OperatorTable, always: int) -> OperatorTable:
    """Operators with the bytes of every slot added to the last operator, which every slot has."""
    full, weights = operators.full.copy(), operators.weights.copy()
    full[-1] += always
    weights[-1] += always
    return OperatorTable(operators.names, full, weights)


def _equal_stages(job: Job) -> list[list[int]]:
    kinds: dict[tuple[object, ...], list[int]] = {}
    for stage in range(job.layout.pipeline):
        kinds.setdefault(stage_kind(job.model, job.layout, stage), []).append(stage)
    return list(kinds.values())


def _fewest(stages: Sequence[OperatorTable], groups: Sequence[Sequence[int]], budget: int) -> int:
    """The shortest window within budget on all stages; a note of InfeasiblePlan names the stage."""
    windows = []
    for operators, group in zip(stages, groups, strict=True):
        try:
            windows.append(fewest_slots(operators, budget).window)
        except InfeasiblePlan as error:
            error.add_note(f'in pipeline stage {group[0]}')
            raise
    return max(windows)


def _stage_kind(
    job: Job, stages: list[int], operators: OperatorTable, plan: WindowPlan, always: int
) -> StageKind:
    logged, held = NOTHING_LOGGED, held_elements(job.model, job.layout, stages[0])
    if job.protection.localized:
        logged = memory.logged_per_iteration(
            job.model, job.layout, job.batch, job.precision, stages[0]
        )
    return StageKind(stages, operators, plan, held, logged, always)
