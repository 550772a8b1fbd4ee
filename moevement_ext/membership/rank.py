# SPDX-License-Identifier: Apache-2.0
"""Facts about this rank that all parts of protection and recovery need."""

from dataclasses import dataclass

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import EventLog
from moevement_ext.membership.exchange import Exchange
from moevement_ext.memory.window.name import RankIdentity


@dataclass(frozen=True)
class Rank:
    """Created once per process; never changes."""

    identity: RankIdentity
    """Run, layout and rank, which every slot contains."""
    world_size: int
    run_id: str
    """Name of the run's directory in host memory."""
    backend: str
    """The backend of `torch.distributed`: gloo or nccl."""
    config: SparseCheckpointConfig
    events: EventLog
    exchange: Exchange
    """With all ranks, or, in a process that joins them, with the data that they left."""

    @property
    def number(self) -> int:
        """Global rank."""
        return self.identity.rank
