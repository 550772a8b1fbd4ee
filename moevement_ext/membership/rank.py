# SPDX-License-Identifier: Apache-2.0
"""This rank in its job: what every part of protection and recovery needs to know of it."""

from dataclasses import dataclass

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import EventLog
from moevement_ext.membership.exchange import Exchange
from moevement_ext.memory.window.name import RankIdentity


@dataclass(frozen=True)
class Rank:
    """Made once in the lifetime of a process; nothing of it changes."""

    identity: RankIdentity
    """Run, layout and rank; what every slot is stamped with."""
    world_size: int
    run_id: str
    """Name of the run's directory in host memory."""
    backend: str
    """The backend of `torch.distributed`: gloo or nccl."""
    config: SparseCheckpointConfig
    events: EventLog
    exchange: Exchange
    """With all ranks, or with what they left for a process that joins them."""

    @property
    def number(self) -> int:
        """Global rank."""
        return self.identity.rank
