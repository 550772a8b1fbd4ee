# SPDX-License-Identifier: Apache-2.0
"""Behaviour of a system between and after failures, for many histories in parallel.

A Run keeps the position of every history; arrays are [histories] unless stated otherwise.

Nodes are numbered by pipeline stage. A stage that replays from its neighbours' logs has no bubble:
m micro-batches through k adjacent lost stages take m + k - 1 stage times, through the whole
pipeline of S stages m + S - 1. Logs between two lost stages are lost with their senders, so
adjacent lost stages replay as one pipeline; separate ones replay in parallel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from ..model import fields
from ..model.fields import Checked, Whole
from .closed_form import Dense, Sparse


class Pipeline(Checked, frozen=True):
    """Nodes of a job."""

    nodes: Whole = 1
    stages: Whole = 1
    """S; a multiple of `nodes`, or `nodes` a multiple of it."""
    micro_batches: Whole = 1
    copies: Whole = 1
    """Number of nodes of a stage with the same state (data-parallel redundancy); 1: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.nodes % self.stages == 0 or self.stages % self.nodes == 0
        fields.require(even, 'stages', self.stages, f'must divide evenly over {self.nodes} nodes')
        good = self.copies == 1 or (self.nodes // self.stages) % self.copies == 0
        good &= self.copies == 1 or self.nodes >= self.stages
        rule = f'must divide the nodes of a stage ({self.nodes} nodes in {self.stages} stages)'
        fields.require(good, 'copies', self.copies, rule)

    def stages_lost(self, lost: np.ndarray) -> np.ndarray:
        """Stages with a lost node, bool [histories, stages]; `lost` is bool [histories, nodes]."""
        if self.stages >= self.nodes:
            return np.repeat(lost, self.stages // self.nodes, axis=1)
        stages: np.ndarray = lost.reshape(len(lost), self.stages, -1).any(axis=2)
        return stages

    def longest_run(self, lost: np.ndarray) -> np.ndarray:
        """Most adjacent lost stages, int [histories]; `lost` is bool [histories, nodes]."""
        stages = self.stages_lost(lost)
        run = np.zeros(len(lost), dtype=int)
        longest = run.copy()
        for stage in range(self.stages):
            run = (run + 1) * stages[:, stage]
            np.maximum(longest, run, out=longest)
        return longest

    def local_saving(self, adjacent: np.ndarray) -> np.ndarray:
        """Share of an iteration saved if `adjacent` stages replay: (S - k) / (m + S - 1)."""
        saving: np.ndarray = (self.stages - adjacent) / (self.micro_batches + self.stages - 1)
        return saving

    def state_lost(self, lost: np.ndarray) -> np.ndarray:
        """True where state has no copy left, bool [histories]; `lost` is [histories, nodes]."""
        if self.copies == 1:
            some: np.ndarray = lost.any(axis=1)
            return some
        groups = lost.reshape(len(lost), self.stages, self.copies, -1)
        gone: np.ndarray = groups.all(axis=2).any(axis=(1, 2))
        return gone


class Run(ABC):
    """A simulated system; see `monte_carlo`."""

    histories: int
    mtbf_s: float
    unit_s: float
    """Seconds of the unit that is kept or lost: a period, an iteration."""
    efficiency: float | np.ndarray
    """Useful seconds per wall second while nothing fails."""
    stationary = True
    """True if the costs do not depend on the age of the job."""

    @abstractmethod
    def advance(self, running: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Train for `seconds` where `running`, then fail; returns the useful seconds kept."""

    @abstractmethod
    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        """Seconds to recover from the end of the last `advance`; `lost` is [histories, nodes]."""


RunFactory = Callable[[int, np.random.Generator], Run]


class DenseRun(Run):
    """A failure loses the current period."""

    def __init__(self, system: Dense, histories: int) -> None:
        self.histories, self.mtbf_s = histories, system.mtbf_s
        self.unit_s = system.period_s
        self.useful_s = system.interval * system.iteration_s
        self.efficiency = self.useful_s / self.unit_s
        self.restart_s = np.full(histories, system.restart_s)

    def advance(self, running: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        kept: np.ndarray = np.where(running, seconds, 0.0) // self.unit_s * self.useful_s
        return kept

    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        return self.restart_s


class SparseRun(Run):
    """A failure loses the running iteration; window and position determine the replay.

    With a pipeline only the lost stages replay, and the system's `local_saving` is ignored.
    """

    def __init__(
        self,
        system: Sparse,
        histories: int,
        rng: np.random.Generator,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.histories, self.mtbf_s = histories, system.mtbf_s
        self.unit_s = system.step_s
        self.iteration_s, self.window = system.iteration_s, system.window
        self.efficiency = system.iteration_s / system.step_s
        self.restart_s = system.restart_s
        self.pipeline = pipeline
        self.local_saving = system.local_saving
        self.conversion = system.active_iterations()
        self.position = self._struck(system, rng)

    def _struck(self, system: Sparse, rng: np.random.Generator) -> np.ndarray:
        """Positions at which failures find the histories: more often where a repair takes long.

        Only success leaves a position, after a mean time in proportion to e^(Q_p/M).
        """
        repairs = system.recovery_s() / system.mtbf_s
        share = np.exp(repairs - repairs.max())
        return rng.choice(system.window, size=self.histories, p=share / share.sum())

    def advance(self, running: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        done = np.where(running, seconds, 0.0) // self.unit_s
        self.position = (self.position + done.astype(np.int64)) % self.window
        kept: np.ndarray = done * self.iteration_s
        return kept

    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        saving: float | np.ndarray = self.local_saving
        if self.pipeline is not None:
            saving = self.pipeline.local_saving(self.pipeline.longest_run(lost))
        replayed = (self.conversion + self.position) * self.iteration_s * (1 - saving)
        seconds: np.ndarray = self.restart_s + replayed
        return seconds


class CopyRun(SparseRun):
    """State is copied from a data-parallel replica, and only the running iteration is lost.

    Without a replica, the windows are converted.

    Args:
        copied_s: seconds of restart and copy; other arguments are those of `SparseRun`.
    """

    def __init__(
        self,
        system: Sparse,
        copied_s: float,
        histories: int,
        rng: np.random.Generator,
        pipeline: Pipeline,
        localized: bool = False,
    ) -> None:
        super().__init__(system, histories, rng, pipeline if localized else None)
        self.copies = pipeline
        self.copied_s = copied_s

    def _struck(self, system: Sparse, rng: np.random.Generator) -> np.ndarray:
        """Positions at which failures find the histories: uniform, as copies take equally long."""
        return rng.integers(system.window, size=self.histories)

    def recovery_s(self, lost: np.ndarray) -> np.ndarray:
        converted = super().recovery_s(lost)
        return np.where(self.copies.state_lost(lost), converted, self.copied_s)
