# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a node keep in host memory, from what all ranks tell of themselves."""

from collections.abc import Collection, Sequence

import msgspec

from moevement_ext.memory.budget import HostMemoryPlan
from moevement_ext.memory.sizing import Logged, log_ring_bytes, rank_memory
from moevement_ext.replicate.copies import Copies, place_copies
from moevement_ext.replicate.domains import failure_domains

ALONE = -1
"""In place of a rank: no other captures the same."""


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
    family: int = ALONE
    """Lowest of the ranks that capture the same as it does, itself included."""
    stub_bytes: int = 0
    """Size of a file for stubs of its windows, which twins keep."""
    slot_bytes: int = 0
    """Mean size of one of its slots in the windows that the job begins with."""


def copies_of(members: Sequence[Member], topology: str | None, replicas: int) -> Copies:
    """Where the copies of the windows of all ranks are.

    Args:
        members: all ranks, where they were when the job began.
        topology: file of failure domains.
        replicas: copies of each rank's windows.

    Raises:
        ConfigurationError: the topology file is wrong.
    """
    families = [
        rank if member.family == ALONE else member.family for rank, member in enumerate(members)
    ]
    return place_copies(domains_of(members, topology), replicas, families)


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


def stubs_at(
    rank: int, members: Sequence[Member], twins: Sequence[Collection[int]]
) -> dict[int, int]:
    """Bytes of a file for stubs by owner, of those that `rank` is a twin of."""
    return {owner: members[owner].stub_bytes for owner, of in enumerate(twins) if rank in of}


def log_bytes(
    member: Member, members: Sequence[Member], longest_window: int, log_lag: float
) -> int:
    """Size of the upstream log of one of the members."""
    most = max((other.logged for other in members), key=lambda it: it.iteration_bytes)
    return log_ring_bytes(member.logged, most, longest_window, log_lag)


def node_plan(
    node: str,
    members: Sequence[Member],
    copies: Copies,
    longest_window: int,
    log_lag: float,
    to_disk: bool,
    holds_none: int | None = None,
) -> HostMemoryPlan:
    """Bytes of every rank on a node.

    Args:
        node: its name.
        members: all ranks.
        copies: where those of each rank are.
        longest_window: W that window files and logs are for.
        log_lag: as of `log_ring_bytes`.
        to_disk: windows are copied to disk.
        holds_none: a rank that holds no replicas, although some are placed there.
    """
    ranks = {}
    for rank, member in enumerate(members):
        if member.node != node:
            continue
        kept: list[int] = []
        if rank != holds_none:
            kept += hosted_by(rank, members, copies.holders).values()
            kept += stubs_at(rank, members, copies.twins).values()
        log = log_bytes(member, members, longest_window, log_lag)
        ranks[rank] = rank_memory(member.capacity_bytes, kept, log, to_disk)
    return HostMemoryPlan(ranks)
