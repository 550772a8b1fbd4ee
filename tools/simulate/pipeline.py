# SPDX-License-Identifier: Apache-2.0
"""Where nodes stand in the pipeline: what a loss leaves, and what a stage saves by replaying alone.

Nodes are numbered stage by stage. A stage that replays from its neighbours' logs has no bubble: m
micro-batches through k adjacent lost stages take m + k - 1 stage times, through the whole pipeline
of S stages m + S - 1. Logs between two lost stages are lost with their senders, so adjacent lost
stages replay as one pipeline; separate ones replay side by side.
"""

from dataclasses import dataclass

import numpy as np

from tools.simulate import fields


@dataclass(frozen=True)
class Pipeline:
    """Nodes of a job.

    Raises:
        FieldError: a field breaks its rule.
    """

    nodes: int = 1
    stages: int = 1
    """S; a multiple of `nodes`, or `nodes` a multiple of it."""
    micro_batches: int = 1
    """m, per iteration."""
    copies: int = 1
    """Nodes of a stage that hold the same state (data-parallel redundancy); 1: none."""

    def __post_init__(self) -> None:
        for name in ('nodes', 'stages', 'micro_batches', 'copies'):
            fields.whole(name, getattr(self, name))
        even = self.nodes % self.stages == 0 or self.stages % self.nodes == 0
        fields.require(even, 'stages', self.stages, f'must divide evenly over {self.nodes} nodes')
        good = self.copies == 1 or (self.nodes // self.stages) % self.copies == 0
        good &= self.copies == 1 or self.nodes >= self.stages
        rule = f'must divide the nodes of a stage ({self.nodes} nodes in {self.stages} stages)'
        fields.require(good, 'copies', self.copies, rule)

    def stages_lost(self, lost: np.ndarray) -> np.ndarray:
        """Stages with a lost node, bool [histories, stages], of nodes bool [histories, nodes]."""
        if self.stages >= self.nodes:
            return np.repeat(lost, self.stages // self.nodes, axis=1)
        stages: np.ndarray = lost.reshape(len(lost), self.stages, -1).any(axis=2)
        return stages

    def longest_run(self, lost: np.ndarray) -> np.ndarray:
        """Most adjacent stages lost, int [histories], of nodes bool [histories, nodes]."""
        stages = self.stages_lost(lost)
        run = np.zeros(len(lost), dtype=int)
        longest = run.copy()
        for stage in range(self.stages):
            run = (run + 1) * stages[:, stage]
            np.maximum(longest, run, out=longest)
        return longest

    def local_saving(self, adjacent: np.ndarray) -> np.ndarray:
        """Share of an iteration saved when `adjacent` stages replay: (S - k) / (m + S - 1)."""
        saving: np.ndarray = (self.stages - adjacent) / (self.micro_batches + self.stages - 1)
        return saving

    def state_lost(self, lost: np.ndarray) -> np.ndarray:
        """True where some state has no copy left, bool [histories], of nodes [histories, nodes]."""
        if self.copies == 1:
            some: np.ndarray = lost.any(axis=1)
            return some
        groups = lost.reshape(len(lost), self.stages, self.copies, -1)
        gone: np.ndarray = groups.all(axis=2).any(axis=(1, 2))
        return gone
