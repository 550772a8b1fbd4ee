# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a node keep in host memory, from what all ranks tell of themselves."""

from collections.abc import Collection, Sequence

import msgspec

from moevement_ext.memory.budget import HostMemoryPlan
from moevement_ext.memory.sizing import Logged, log_ring_bytes, rank_memory
from moevement_ext.replicate.domains import failure_domains


class Member(msgspec.Struct, frozen=True):
    """What a rank tells the others about its host memory."""

    node: str
    """Name of its node, real or emulated."""
    capacity_bytes: int
    """Size of one of its window files."""
    logged: Logged
    """What it logs; its upstream log is sized for that."""
    host: str
    """The real host, which emulated nodes share."""
    salt: bytes
    """Makes the secret of the job one of this life, from rank 0; what others draw is not used."""
    domain: str = ''
    """Failure domain by the topology file of its node; empty: that does not tell."""


def domains_of(members: Sequence[Member], topology: str | None) -> list[str]:
    """Failure domains by rank, as known to all: a replacement's node may lack the file."""
    told = [member.domain for member in members]
    if topology is not None and all(told):
        return told
    return failure_domains([member.node for member in members], topology)


def hosted_by(
    rank: int, members: Sequence[Member], holders: Sequence[Collection[int]]
) -> dict[int, int]:
    """Bytes of a window file by owner, of those whose replicas `rank` holds."""
    return {
        owner: members[owner].capacity_bytes for owner, peers in enumerate(holders) if rank in peers
    }


def log_bytes(
    member: Member, members: Sequence[Member], longest_window: int, log_lag: float
) -> int:
    """Size of the upstream log of one of the members."""
    most = max((other.logged for other in members), key=lambda it: it.iteration_bytes)
    return log_ring_bytes(member.logged, most, longest_window, log_lag)


def node_plan(
    node: str,
    members: Sequence[Member],
    holders: Sequence[Collection[int]],
    longest_window: int,
    log_lag: float,
    to_disk: bool,
    holds_none: int | None = None,
) -> HostMemoryPlan:
    """Bytes of every rank on a node.

    Args:
        node: its name.
        members: all ranks.
        holders: of the replicas of each rank.
        longest_window: W that window files and logs are for.
        log_lag: as of `log_ring_bytes`.
        to_disk: windows are copied to disk.
        holds_none: a rank that holds no replicas, although some are placed there.
    """
    ranks = {}
    for rank, member in enumerate(members):
        if member.node != node:
            continue
        hosted = {} if rank == holds_none else hosted_by(rank, members, holders)
        log = log_bytes(member, members, longest_window, log_lag)
        ranks[rank] = rank_memory(member.capacity_bytes, hosted.values(), log, to_disk)
    return HostMemoryPlan(ranks)
