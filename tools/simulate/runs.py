# SPDX-License-Identifier: Apache-2.0
"""Behaviour of a system between and after failures, for many histories in parallel.

A Run keeps the position of every history; arrays are [histories] unless stated otherwise.

Nodes are numbered by pipeline stage. A stage that replays from its neighbours' logs has no bubble:
m micro-batches through k adjacent lost stages take m + k - 1 stage times, through the whole
pipeline of S stages m + S - 1. Logs between two lost stages are lost with their senders, so
adjacent lost stages replay as one pipeline; separate ones replay in parallel.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from ..model.fields import Whole, require
from .closed_form import Costs, Dense, Sparse


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
