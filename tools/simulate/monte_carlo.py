# SPDX-License-Identifier: Apache-2.0
"""Discrete-event simulation of many histories at once: one step per failure, not per iteration.

Nothing is random between two failures, so that time is computed in one step. A history is in one of
two states: running since `ready`, or recovering until `ready`; a failure before `ready` restarts
the recovery, including its process restart. A Run is the behaviour of a system; it keeps the
position of every history. Arrays are [histories] unless stated otherwise.

Nodes are numbered by pipeline stage. A stage that replays from its neighbours' logs has no bubble:
m micro-batches through k adjacent lost stages take m + k - 1 stage times, through the whole
pipeline of S stages m + S - 1. Logs between two lost stages are lost with their senders, so
adjacent lost stages replay as one pipeline; separate ones replay in parallel.

A history begins at a failure and ends at its n-th failure, so that it has whole cycles and its ends
add no bias. Without failures it begins fresh and ends at a horizon, where work in progress counts
as kept. The confidence interval is that of a ratio of means over independent histories (delta
method).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from ..lab.fields import Whole, require
from .closed_form import Costs, Dense, Sparse

HISTORIES = 512
FAILURES_PER_HISTORY = 400
MOST_FAILURES, MOST_FIGURES = 20_000_000, 200_000_000
"""Limits of failures over all histories, and of histories times nodes, given by memory."""

_ROUNDING = 1e-12
_STUDENT = 1.9646172187075097  # 97.5 % quantile of Student's t for 511 degrees of freedom


class Pipeline(msgspec.Struct, frozen=True):
    """Nodes of a job."""

    nodes: Whole = 1
    stages: Whole = 1
    """S; a multiple of `nodes`, or `nodes` a multiple of it."""
    micro_batches: Whole = 1
    copies: Whole = 1
    """Number of nodes of a stage with the same state (data-parallel redundancy); 1: none."""

    def __post_init__(self) -> None:
        even = self.nodes % self.stages == 0 or self.stages % self.nodes == 0
        require(even, 'stages', self.stages, f'must divide evenly over {self.nodes} nodes')
        apart = self.nodes >= self.stages and (self.nodes // self.stages) % self.copies == 0
        rule = f'must divide the nodes of a stage ({self.nodes} nodes in {self.stages} stages)'
        require(self.copies == 1 or apart, 'copies', self.copies, rule)

    def longest_run(self, lost: np.ndarray) -> np.ndarray:
        """Most adjacent stages with a lost node, int [histories]; `lost` is [histories, nodes]."""
        if self.stages >= self.nodes:
            stages = np.repeat(lost, self.stages // self.nodes, axis=1)
        else:
            stages = lost.reshape(len(lost), self.stages, -1).any(axis=2)
        run = longest = np.zeros(len(lost), dtype=int)
        for stage in stages.T:
            run = (run + 1) * stage
            longest = np.maximum(longest, run)
        return longest

    def local_saving(self, adjacent: np.ndarray) -> np.ndarray:
        """Share of an iteration saved if `adjacent` stages replay: (S - k) / (m + S - 1)."""
        saving: np.ndarray = (self.stages - adjacent) / (self.micro_batches + self.stages - 1)
        return saving

    def state_lost(self, lost: np.ndarray) -> np.ndarray:
        """True where state has no copy left, bool [histories]; `lost` is [histories, nodes]."""
        per_stage = self.stages if self.copies > 1 else 1
        groups = lost.reshape(len(lost), per_stage, self.copies, -1)
        gone: np.ndarray = groups.all(axis=2).any(axis=(1, 2))
        return gone


class Run:
    """A simulated system: a failure loses the current unit, and costs the restart."""

    def __init__(self, costs: Costs, histories: int) -> None:
        self.costs, self.histories = costs, histories
        kept = costs.period if isinstance(costs, Dense) else 1
        self.useful_s = kept * costs.iteration_s
        self.efficiency: float | np.ndarray = self.useful_s / costs.unit_s
        """Useful seconds per wall second while nothing fails."""

    def advance(self, running: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Train for `seconds` where `running`, then fail; returns the useful seconds kept."""
        kept: np.ndarray = np.where(running, seconds, 0.0) // self.costs.unit_s * self.useful_s
        return kept

    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        """Seconds to recover from the end of the last `advance`; `lost` is [histories, nodes]."""
        return np.full(self.histories, self.costs.restart_s)


RunFactory = Callable[[int, np.random.Generator], Run]


class SparseRun(Run):
    """A failure loses the running iteration; window and position determine the replay.

    Args:
        pipeline: only its lost stages replay, and the costs' `local_saving` is ignored.
        copies: nodes of which a data-parallel replica gives the state of a lost one, so that
            only the running iteration is lost, and seconds of restart and copy. Without a replica
            the windows are converted.
    """

    def __init__(
        self,
        costs: Sparse,
        histories: int,
        rng: np.random.Generator,
        pipeline: Pipeline | None = None,
        copies: tuple[Pipeline, float] | None = None,
    ) -> None:
        super().__init__(costs, histories)
        self.pipeline, self.copies, self.local_saving = pipeline, copies, costs.local_saving
        self.converted = float(costs.conversion().sum())
        # Failures find histories more often where a repair takes long: only success leaves a
        # position, after a mean time in proportion to e^(Q_p/M). All copies take equally long.
        repairs = costs.recovery_s() / costs.mtbf_s
        share = np.exp(repairs - repairs.max())
        if copies:
            self.position = rng.integers(costs.period, size=histories)
        else:
            self.position = rng.choice(costs.period, size=histories, p=share / share.sum())

    def advance(self, running: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        done = np.where(running, seconds, 0.0) // self.costs.unit_s
        self.position = (self.position + done.astype(np.int64)) % self.costs.period
        kept: np.ndarray = done * self.useful_s
        return kept

    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        saving: float | np.ndarray = self.local_saving
        if self.pipeline is not None:
            saving = self.pipeline.local_saving(self.pipeline.longest_run(lost))
        replayed_s = (self.converted + self.position) * self.useful_s * (1 - saving)
        seconds: np.ndarray = self.costs.restart_s + replayed_s
        if self.copies is not None:
            nodes, copied_s = self.copies
            seconds = np.where(nodes.state_lost(lost), seconds, copied_s)
        return seconds


# ---- the simulation


class FailureTimes(NamedTuple):
    """Failures of several histories; arrays of shape [histories, failures]."""

    times: np.ndarray
    """Seconds since the start, ascending along a row."""
    nodes: np.ndarray
    """The failed node, 0 .. nodes - 1."""


class Process(msgspec.Struct, frozen=True):
    """Failures with independent Weibull gaps; all nodes are equally likely to fail."""

    mtbf_s: float
    shape: float = 1.0
    """1: the Poisson process; below 1 failures bunch, above 1 they are regular."""

    def first(
        self, rng: np.random.Generator, histories: int, count: int, nodes: int
    ) -> FailureTimes:
        """The first `count` failures. Raises FieldError: there are too many."""
        rule = f'above {MOST_FAILURES} failures do not fit in memory; simulate fewer hours'
        require(histories * count <= MOST_FAILURES, 'hours', histories * count, rule)
        if self.shape == 1:
            gaps = rng.exponential(self.mtbf_s, (histories, count))
        else:
            scale_s = self.mtbf_s / math.gamma(1 + 1 / self.shape)
            gaps = scale_s * rng.weibull(self.shape, (histories, count))
        return FailureTimes(gaps.cumsum(axis=1), rng.integers(nodes, size=gaps.shape))


class Estimate(NamedTuple):
    """Result of a simulation."""

    ettr: float
    ci95: tuple[float, float]
    failures: int
    hours: float
    lost_s: float
    """Wall seconds lost per failure: restart, replay and repeated work; nan without failures."""
    struck_again: float


def simulate(
    system: Dense | Sparse | RunFactory,
    process: Process | None = None,
    *,
    nodes: int = 1,
    hours: float | None = None,
    seed: int = 0,
) -> Estimate:
    """Simulate a system under failures; equal arguments give equal results.

    Args:
        system: costs as in the closed formulas, or a factory of a Run for a number of histories.
        process: process of the failures; None: Poisson with the system's MTBF.
        nodes: nodes of the job; the failed node matters to some Runs.
        hours: hours to simulate, on average, over all histories.
        seed: seed of the random numbers.

    Raises:
        FieldError: an argument breaks its rule.
    """
    text = f'{HISTORIES} histories of that many do not fit in memory'
    require(HISTORIES * nodes <= MOST_FIGURES, 'nodes', nodes, text)
    # Failures have a separate stream: all systems get the same ones.
    rng, run_rng = np.random.default_rng(seed).spawn(2)
    if isinstance(system, Dense):
        run = Run(system, HISTORIES)
    elif isinstance(system, Sparse):
        run = SparseRun(system, HISTORIES, run_rng)
    else:
        run = system(HISTORIES, run_rng)
    process = process or Process(run.costs.mtbf_s)
    history_s = None if hours is None else 3600 * hours / HISTORIES
    if math.isinf(process.mtbf_s):
        never = FailureTimes(*(np.empty((HISTORIES, 0), kind) for kind in (float, int)))
        return Histories(run, never, nodes).play(history_s or 1000 * run.costs.unit_s)
    failures = FAILURES_PER_HISTORY
    if history_s is not None:
        failures = max(1, round(history_s / process.mtbf_s))
    played = Histories(run, process.first(rng, HISTORIES, failures, nodes), nodes)
    played.begin_with_failure(rng.integers(nodes, size=HISTORIES))
    return played.play()


class Histories:
    """All histories, advanced in parallel from failure to failure."""

    def __init__(self, run: Run, drawn: FailureTimes, nodes: int) -> None:
        histories = len(drawn.times)
        self.run, self.drawn = run, drawn
        self.ready = np.zeros(histories)
        self.useful = np.zeros(histories)
        self.lost = np.zeros((histories, nodes), dtype=bool)
        self.failures = self.struck_again = 0
        self.rows = np.arange(histories)

    def begin_with_failure(self, nodes: np.ndarray) -> None:
        """Begin each history at a failure of one of its nodes."""
        self.lost[self.rows, nodes] = True
        self.ready = self.run.recovery_s(self.lost)

    def play(self, horizon_s: float | None = None) -> Estimate:
        """Run all histories to the horizon, by default to the last failure."""
        for column in range(self.drawn.times.shape[1]):
            self._fail(column)
        if horizon_s is None:
            wall = self.drawn.times[:, -1]
        else:  # work in progress counts as kept
            self.useful += np.maximum(horizon_s - self.ready, 0.0) * self.run.efficiency
            wall = np.full(len(self.ready), horizon_s)
        ettr, half = ratio_interval(self.useful, wall)
        lost_s = math.nan
        if self.failures:
            lost_s = float((wall - self.useful / self.run.efficiency).sum()) / self.failures
        return Estimate(
            ettr=ettr,
            ci95=(max(0.0, ettr - half), min(1.0, ettr + half)),
            failures=self.failures,
            hours=float(wall.sum()) / 3600,
            lost_s=lost_s,
            struck_again=self.struck_again / max(1, self.failures),
        )

    def _fail(self, column: int) -> None:
        """Advance each history to its failure in this column."""
        at = self.drawn.times[:, column]
        running = at >= self.ready
        seconds = np.where(running, at - self.ready, 0.0)
        self.useful += self.run.advance(running, seconds)
        self.lost[running] = False
        self.lost[self.rows, self.drawn.nodes[:, column]] = True
        self.ready = at + self.run.recovery_s(self.lost)
        self.failures += len(at)
        self.struck_again += int((~running).sum())


def ratio_interval(useful: np.ndarray, wall: np.ndarray) -> tuple[float, float]:
    """Ratio of the means of two figures per history, and half its 95 % confidence interval."""
    count = len(useful)
    ratio = float(useful.sum() / wall.sum())
    spread = math.sqrt(float(((useful - ratio * wall) ** 2).sum()) / (count - 1) / count)
    return ratio, _STUDENT * spread / float(wall.mean()) + _ROUNDING
