# SPDX-License-Identifier: Apache-2.0
"""Facts about this rank, and its place in the layout of the job."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

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


class Place(NamedTuple):
    """The place of one rank."""

    stage: int
    """Its stage of the pipeline."""
    members: Sequence[int]
    """All ranks of that stage, in the order of `group`."""
    group: torch.distributed.ProcessGroup | None
    """The group of `members`; None: all ranks of the job."""
    replicas: Sequence[int]
    """Other ranks that hold the same state, bit for bit."""
    interleaved: bool
    """The rank has several model chunks (interleaved schedule), so the last stage sends to the
    first."""
    twins: Sequence[int] = ()
    """Other ranks that capture the same slices, with the same bytes except volatile ones (see
    `capture.layout.TensorSlice`). `replicas` are not twins if each captures a share of the
    state."""
