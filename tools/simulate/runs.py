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

    stationary = True
    """True if the costs do not depend on the age of the job."""

    def __init__(self, costs: Costs, histories: int, unit_s: float, useful_s: float) -> None:
        self.histories, self.mtbf_s, self.restart_s = histories, costs.mtbf_s, costs.restart_s
        self.unit_s, self.useful_s = unit_s, useful_s
        self.efficiency: float | np.ndarray = useful_s / unit_s
        """Useful seconds per wall second while nothing fails."""

    def advance(self, running: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Train for `seconds` where `running`, then fail; returns the useful seconds kept."""
        kept: np.ndarray = np.where(running, seconds, 0.0) // self.unit_s * self.useful_s
        return kept

    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        """Seconds to recover from the end of the last `advance`; `lost` is [histories, nodes]."""
        return np.full(self.histories, self.restart_s)


RunFactory = Callable[[int, np.random.Generator], Run]


class DenseRun(Run):
    """A failure loses the current period."""

    def __init__(self, costs: Dense, histories: int) -> None:
        super().__init__(costs, histories, costs.period_s, costs.period * costs.iteration_s)


class SparseRun(Run):
    """A failure loses the running iteration; window and position determine the replay.

    With a pipeline only the lost stages replay, and the costs' `local_saving` is ignored.
    """

    def __init__(
        self,
        costs: Sparse,
        histories: int,
        rng: np.random.Generator,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__(costs, histories, costs.step_s, costs.iteration_s)
        self.costs, self.pipeline = costs, pipeline
        self.position = self._struck(rng)

    def _struck(self, rng: np.random.Generator) -> np.ndarray:
        """Positions at which failures find the histories: more often where a repair takes long.

        Only success leaves a position, after a mean time in proportion to e^(Q_p/M).
        """
        repairs = self.costs.recovery_s() / self.costs.mtbf_s
        share = np.exp(repairs - repairs.max())
        return rng.choice(self.costs.period, size=self.histories, p=share / share.sum())

    def advance(self, running: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        done = np.where(running, seconds, 0.0) // self.unit_s
        self.position = (self.position + done.astype(np.int64)) % self.costs.period
        kept: np.ndarray = done * self.useful_s
        return kept

    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        saving: float | np.ndarray = self.costs.local_saving
        if self.pipeline is not None:
            saving = self.pipeline.local_saving(self.pipeline.longest_run(lost))
        replayed = self.costs.active_iterations() + self.position
        seconds: np.ndarray = self.restart_s + replayed * self.useful_s * (1 - saving)
        return seconds


class CopyRun(SparseRun):
    """State is copied from a data-parallel replica, and only the running iteration is lost.

    Without a replica, the windows are converted.

    Args:
        copied_s: seconds of restart and copy; other arguments are those of `SparseRun`.
    """

    def __init__(
        self,
        costs: Sparse,
        copied_s: float,
        histories: int,
        rng: np.random.Generator,
        pipeline: Pipeline,
        localized: bool = False,
    ) -> None:
        super().__init__(costs, histories, rng, pipeline if localized else None)
        self.copies, self.copied_s = pipeline, copied_s

    def _struck(self, rng: np.random.Generator) -> np.ndarray:
        """Positions at which failures find the histories: uniform, as copies take equally long."""
        return rng.integers(self.costs.period, size=self.histories)

    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        converted = super().recovery_s(lost)
        return np.where(self.copies.state_lost(lost), converted, self.copied_s)
