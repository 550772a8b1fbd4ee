# SPDX-License-Identifier: Apache-2.0
"""The whole plan of a job: window, exposed time, traffic, memory, recovery and ETTR.

Windows come from the planner that the training uses; stages that hold equal bytes are planned once.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moevement_ext.config import (
    AUTO,
    LONGEST_WINDOW,
    ConfigurationError,
    SparseCheckpointConfig,
)
from moevement_ext.memory.budget import HostMemoryPlan
from moevement_ext.memory.sizing import NOTHING_LOGGED, Logged, window_lengths
from moevement_ext.plan.algorithm1 import plan_as_printed
from moevement_ext.plan.auto_window import FIRST_WINDOW
from moevement_ext.plan.byte_planner import (
    DEFAULT_HIDDEN_FRACTION,
    InfeasiblePlan,
    OperatorBytes,
    WindowPlan,
    bytes_over_budget,
    fewest_slots,
    plan_stages,
)
from moevement_ext.plan.windows import (
    DEFAULT_NETWORK_SHARE,
    Budgets,
    budgets,
    held_to,
    needs,
    shortest,
)
from moevement_ext.replicate.copies import Copies
from tools.plan import memory
from tools.plan.layout import Batch, Layout, Precision
from tools.plan.model import ModelShape
from tools.plan.presets import Cluster
from tools.plan.sizes import held_elements, operator_sizes, scaling_bytes, stage_kind
from tools.simulate import fields
from tools.simulate.closed_form import Sparse

_LONGEST_SOUGHT = 64
"""Windows beyond those that are allowed, to say how long one would have to be."""


@dataclass(frozen=True)
class ProtectionSettings:
    """Settings of sparse checkpointing; defaults are those of the training's flags."""

    window: int | None = None
    """Iterations; None: the fewest that the links carry."""
    max_window: int = 8
    """The longest window that None may lead to; host memory is reserved for it."""
    replicas: int = 2
    localized: bool = True
    """Log what stages send, so that a lost one replays alone."""
    hidden_fraction: float = DEFAULT_HIDDEN_FRACTION
    """Share of an iteration that can hide a copy."""
    network_share: float = DEFAULT_NETWORK_SHARE
    """Share of a node's network that replication may take; the rest is training's."""
    network_gb_per_s: float | str = AUTO
    """The flag of that name: a number, for a rank, takes the place of the share."""
    log_lag: float | None = None
    """Iterations that persisting a window takes, which the log has room for; None: from the rates
    of the cluster."""
    disk: bool = False
    """Windows are copied to disk, which takes one more window file of each rank's own."""

    def __post_init__(self) -> None:
        if self.window is not None:
            fields.whole('window', self.window, most=LONGEST_WINDOW)
        fields.whole('max_window', self.max_window, most=LONGEST_WINDOW)
        fields.check(self, count='replicas', part='hidden_fraction network_share',
                     not_negative='log_lag')  # fmt: skip
        try:
            _ = self.network_bytes_per_s
        except ConfigurationError as error:
            rule = str(error).partition(' must be ')[2]
            problem = f'is {self.network_gb_per_s!r}; give {rule}'
            raise fields.FieldError('network_gb_per_s', problem) from error

    @property
    def network_bytes_per_s(self) -> float | None:
        """What replication of a rank is held to; None: to a share of the link."""
        return SparseCheckpointConfig(network_gb_per_s=self.network_gb_per_s).network_bytes_per_s

    @property
    def longest_window(self) -> int:
        """Iterations that host memory is reserved for, if so much fits."""
        return self.max_window if self.window is None else self.window


@dataclass(frozen=True)
class FailureRate:
    """How often the job fails, and what a recovery takes besides the replay."""

    mtbf_s: float = math.inf
    """Mean seconds between failures of the job."""
    restart_s: float = 30.0
    """Seconds from a failure until the replay begins."""
    local_saving: float = 0.0
    """Share of a replayed iteration that is saved as only the lost stage computes."""
    frozen_saving: float = 0.0
    """Share of an operator's work that is saved while it is frozen."""

    def __post_init__(self) -> None:
        fields.check(self, positive_or_infinite='mtbf_s', not_negative='restart_s',
                     share='local_saving frozen_saving')  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Everything a plan depends on.

    Raises:
        FieldError: a field breaks its rule or fields do not fit together.
    """

    model: ModelShape
    layout: Layout
    batch: Batch
    cluster: Cluster
    iteration_s: float
    """Seconds of an iteration without checkpointing."""
    precision: Precision = field(default_factory=Precision)
    protection: ProtectionSettings = field(default_factory=ProtectionSettings)
    failures: FailureRate = field(default_factory=FailureRate)
    overhead_s: float = 0.0
    """Measured seconds added to each iteration, besides the exposed time that is computed."""

    def __post_init__(self) -> None:
        fields.check(self, positive='iteration_s', not_negative='overhead_s')
        self.batch.micro_batches(self.layout.data)

    @property
    def ranks_per_node(self) -> int:
        """Ranks on a full node."""
        return min(self.cluster.gpus_per_node, self.layout.ranks)

    @property
    def send_bytes_per_s(self) -> float:
        """What replication of a rank takes of the network, on average at most."""
        link, settings = self.cluster.network_bytes_per_s / self.ranks_per_node, self.protection
        return held_to(link, settings.network_share, settings.network_bytes_per_s) or link

    @property
    def nodes(self) -> int:
        """Nodes in use."""
        return -(-self.layout.ranks // self.ranks_per_node)

    @property
    def copies(self) -> int:
        """Replicas that there are other nodes for."""
        return min(self.protection.replicas, self.nodes - 1)

    @property
    def placed(self) -> Copies:
        """Where they are."""
        return memory.copies(self.layout, self.ranks_per_node, self.protection.replicas)

    @property
    def sent(self) -> int:
        """Those of them that are sent; of the others data-parallel peers capture the same."""
        return max(map(len, self.placed.holders))


@dataclass(frozen=True)
class StageKind:
    """Stages that hold equal bytes, and their window. Slots are those of the first of them."""

    stages: list[int]
    operators: list[OperatorBytes]
    plan: WindowPlan
    held_parameters: int
    """Parameters that a rank computes with."""
    logged: Logged
    """What each rank logs per iteration."""
    always: int = 0
    """Bytes of each rank that are in every slot, whatever it captures."""

    def slot_bytes(self) -> np.ndarray:
        """int64 (window, ranks of a stage)."""
        return np.array(self.plan.slot_bytes(self.operators), dtype=np.int64) + self.always


@dataclass(frozen=True)
class PaperPlan:
    """What the paper's Algorithm 1 says to the same operators and budget."""

    window: int
    bytes_over_budget: int
    """Bytes by which the worst slot on the worst rank exceeds the budget."""


@dataclass(frozen=True)
class JobPlan:
    """Results for one job; see the properties."""

    job: Job
    budgets: Budgets
    kinds: list[StageKind]
    fewest: int | None
    """The shortest window that the links carry; None: there is none, or a very long one."""
    fewest_by_copy: int | None
    """The same if the network were no limit."""
    paper: PaperPlan
    longest: int
    """W that host memory is reserved for."""

    @property
    def limited_by(self) -> str:
        """`copy` or `network`: what makes the window as long as it is."""
        return 'copy' if self.fewest == self.fewest_by_copy else 'network'

    @property
    def window(self) -> int:
        """W, iterations."""
        return self.kinds[0].plan.window

    def exposed_s(self) -> np.ndarray:
        """Seconds by which each slot's copy lengthens its iteration, float64 (window,)."""
        largest = np.max([kind.slot_bytes().max(axis=1) for kind in self.kinds], axis=0)
        over = np.maximum(largest - self.budgets.copy_bytes, 0)
        seconds: np.ndarray = over / self.job.cluster.copy_bytes_per_s
        return seconds

    def _busiest_node(self, values: Sequence[np.ndarray]) -> np.float64:
        """The greatest sum over the ranks of a node, of values (ranks of a stage,) of each kind."""
        of_ranks = per_rank(self.job.layout, self.kinds, values)
        nodes = np.arange(len(of_ranks)) // self.job.ranks_per_node
        return np.bincount(nodes, weights=of_ranks).max()

    def replicated_bytes(self) -> float:
        """Bytes that leave the busiest node per iteration, mean over the window."""
        means = [kind.slot_bytes().mean(axis=0) for kind in self.kinds]
        return float(self.job.sent * self._busiest_node(means))

    def queued(self, kind: StageKind) -> np.ndarray:
        """Bytes that wait to be sent to a holder after each slot, int64 (window, ranks of a stage).

        At the pace that replication takes of the network on average. They wait in the file of their
        window, which host memory has room for.
        """
        slots = kind.slot_bytes()
        offered = self.budgets.network_bytes
        if offered is None:
            return np.zeros_like(slots)
        for before, slot in itertools.pairwise(slots):
            slot += np.maximum(before - offered, 0)
        return slots

    def queue_bytes(self) -> int:
        """The most of them, on any rank."""
        return max(int(self.queued(kind).max()) for kind in self.kinds)

    def network_bytes(self) -> float:
        """Bytes per iteration that a node's network has for replication."""
        return self.job.send_bytes_per_s * self.job.ranks_per_node * self.job.iteration_s

    def log_bytes_of_node(self) -> int:
        """Bytes per iteration that the busiest node logs."""
        return int(self._busiest_node([np.array(one.logged.iteration_bytes) for one in self.kinds]))

    def host_memory(self, longest_window: int | None = None) -> HostMemoryPlan:
        """Memory of the node that needs most.

        Args:
            longest_window: iterations to reserve memory for; None: as the training does.
        """
        return _host_memory(self.job, self.kinds, longest_window or self.longest, self.log_lag())

    def taken_bytes(self) -> int:
        """Bytes that this node takes of it with this window; a longer one takes more for the log.

        Windows of any length take what the longest does.
        """
        longest, window = self.longest, self.window
        if self.job.protection.window is None:
            window = max(window, min(longest, FIRST_WINDOW))
        whole = _host_memory(self.job, self.kinds, longest, self.log_lag(), window)
        return whole.node_total

    def persist_s(self) -> float:
        """Seconds from the beginning of the copy of a window's last slot until it is persisted.

        The slot is copied, summed and sent to the holders after what waits before it; they sum the
        whole window; then that is announced.
        """
        cluster = self.job.cluster
        last = max(int(kind.slot_bytes()[-1].max()) for kind in self.kinds)
        seconds = last / cluster.copy_bytes_per_s + last / memory.CHECKSUM_BYTES_PER_S
        if self.job.sent:
            share = self.job.send_bytes_per_s
            whole = max(int(kind.slot_bytes().sum(axis=0).max()) for kind in self.kinds)
            queued = max(int(self.queued(kind)[-1].max()) for kind in self.kinds)
            seconds += self.job.sent * queued / share + whole / memory.CHECKSUM_BYTES_PER_S
        return seconds + memory.ANNOUNCEMENT_S

    def log_lag(self) -> float:
        """Iterations of its log that are written until a window is persisted, at most 1.

        The next window does not begin before that.
        """
        job = self.job
        if job.protection.log_lag is not None:
            return job.protection.log_lag
        return min(1.0, memory.log_lag(job.layout, job.batch, self.persist_s(), job.iteration_s))

    def effectiveness(self) -> Sparse:
        """Recovery and ETTR in closed form."""
        failures = self.job.failures
        return Sparse(
            iteration_s=self.job.iteration_s,
            window=self.window,
            overhead_s=self.job.overhead_s + float(self.exposed_s().mean()),
            restart_s=failures.restart_s,
            mtbf_s=failures.mtbf_s,
            local_saving=failures.local_saving,
            frozen_saving=failures.frozen_saving,
        )


def iteration_seconds(
    model: ModelShape, layout: Layout, batch: Batch, cluster: Cluster, mfu: float
) -> float:
    """Seconds of an iteration at a model FLOPs utilization in (0, 1]."""
    fields.part('mfu', mfu)
    flops = model.flops_per_token(batch.sequence_length) * batch.tokens
    return flops / (layout.ranks * cluster.peak_flops * mfu)


def hidden_budgets(job: Job) -> Budgets:
    """What the links of a rank move while an iteration computes."""
    settings = job.protection
    return budgets(
        job.iteration_s,
        job.cluster.copy_bytes_per_s,
        job.cluster.network_bytes_per_s / job.ranks_per_node,
        job.sent,
        settings.hidden_fraction,
        settings.network_share,
        settings.network_bytes_per_s,
    )


def plan_job(job: Job) -> JobPlan:
    """Plan all stages with one window.

    Raises:
        InfeasiblePlan: the window is left to the planner, and the copy of one operator alone takes
            too long; a note names the stage.
        FieldError: model and layout do not fit together.
    """
    carried = hidden_budgets(job)
    groups = _equal_stages(job)
    stages = [operator_sizes(job.model, job.layout, job.precision, group[0]) for group in groups]
    always = [scaling_bytes(job.model, job.layout, job.precision, group[0]) for group in groups]
    planned = [_with_always(*pair) for pair in zip(stages, always, strict=True)]

    def kinds_of(window: int) -> list[StageKind]:
        plans = plan_stages(stages, window=window, budget=carried.bytes)
        return [_stage_kind(job, *one) for one in zip(groups, stages, plans, always, strict=True)]

    longest = _longest_that_fits(job, kinds_of(1))
    by_copy = _fewest(planned, carried.copy_bytes)
    window, fewest = job.protection.window, None
    if by_copy is not None:
        found = [needs(*stage) for stage in zip(stages, always, strict=True)]
        fewest = shortest(found, carried, max(_LONGEST_SOUGHT, job.protection.longest_window))
    if window is None:
        if by_copy is None:
            raise _reason(planned, groups, carried.copy_bytes)
        window = min(fewest or LONGEST_WINDOW, longest)
    kinds = kinds_of(window)
    paper = _paper_plan(planned, carried.bytes)
    return JobPlan(job, carried, kinds, fewest, by_copy, paper, longest)


def per_rank(
    layout: Layout, kinds: Sequence[StageKind], values: Sequence[np.ndarray]
) -> np.ndarray:
    """Values of every global rank from those (ranks of a stage,) of each kind of stage."""
    by_stage = [np.empty(0)] * layout.pipeline
    for kind, value in zip(kinds, values, strict=True):
        for stage in kind.stages:
            by_stage[stage] = np.broadcast_to(value, layout.stage_ranks)
    return np.concatenate(by_stage)


def _host_memory(
    job: Job,
    kinds: Sequence[StageKind],
    longest: int,
    log_lag: float,
    logged_window: int | None = None,
) -> HostMemoryPlan:
    """With windows and logs for the longest, or with logs for a shorter window."""
    files = [np.array(memory.window_files(kind.operators, longest, kind.always)) for kind in kinds]
    stubs = [np.array(memory.stub_files(kind.operators, longest, kind.always)) for kind in kinds]
    rings = memory.log_rings([kind.logged for kind in kinds], logged_window or longest, log_lag)
    return memory.fullest_node(
        per_rank(job.layout, kinds, files).astype(np.int64),
        per_rank(job.layout, kinds, [np.array(ring) for ring in rings]).astype(np.int64),
        job.ranks_per_node,
        job.placed,
        job.protection.disk,
        per_rank(job.layout, kinds, stubs).astype(np.int64),
    )


def _longest_that_fits(job: Job, kinds: Sequence[StageKind]) -> int:
    """W that host memory has room for, as the training finds it before iteration 1."""
    settings = job.protection
    if settings.window is not None:
        return settings.window
    lag = SparseCheckpointConfig.log_lag if settings.log_lag is None else settings.log_lag
    lengths = window_lengths(settings.max_window)

    def too_long(length: int) -> bool:
        return _host_memory(job, kinds, length, lag).node_total > job.cluster.host_memory_bytes

    return lengths[max(bisect_left(lengths, True, key=too_long) - 1, 0)]


def _with_always(operators: Sequence[OperatorBytes], always: int) -> list[OperatorBytes]:
    """Operators of which the last carries what is in every slot: so does it, in full or light."""
    *others, last = operators
    full, light = (tuple(size + always for size in sizes) for sizes in (last.full, last.light))
    return [*others, OperatorBytes(last.name, full, light)]


def _equal_stages(job: Job) -> list[list[int]]:
    kinds: dict[tuple[object, ...], list[int]] = {}
    for stage in range(job.layout.pipeline):
        kinds.setdefault(stage_kind(job.model, job.layout, stage), []).append(stage)
    return list(kinds.values())


def _fewest(stages: Sequence[Sequence[OperatorBytes]], budget: int) -> int | None:
    """The shortest window within budget on all stages; None: there is none."""
    try:
        return max(fewest_slots(operators, budget).window for operators in stages)
    except InfeasiblePlan:
        return None


def _reason(
    stages: Sequence[Sequence[OperatorBytes]], groups: Sequence[Sequence[int]], budget: int
) -> InfeasiblePlan:
    """The error of the first stage that no window is within budget on."""
    for operators, group in zip(stages, groups, strict=True):
        try:
            fewest_slots(operators, budget)
        except InfeasiblePlan as error:
            error.add_note(f'in pipeline stage {group[0]}')
            return error
    raise AssertionError('every stage has a window')


def _stage_kind(
    job: Job, stages: list[int], operators: list[OperatorBytes], plan: WindowPlan, always: int
) -> StageKind:
    logged = NOTHING_LOGGED
    if job.protection.localized:
        logged = memory.logged_per_iteration(
            job.model, job.layout, job.batch, job.precision, stages[0]
        )
    held = held_elements(job.model, job.layout, stages[0])
    return StageKind(stages, operators, plan, held, logged, always)


def _paper_plan(stages: Sequence[Sequence[OperatorBytes]], budget: int) -> PaperPlan:
    plans = [plan_as_printed(operators, budget) for operators in stages]
    over = (bytes_over_budget(*pair, budget) for pair in zip(plans, stages, strict=True))
    return PaperPlan(max(plan.window for plan in plans), max(over))
