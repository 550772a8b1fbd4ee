# SPDX-License-Identifier: Apache-2.0
"""Host memory of a node's ranks, computed from the descriptions of all ranks."""

import logging
from bisect import bisect_left
from collections.abc import Collection, Sequence

import msgspec

from moevement_ext.memory.budget import HostMemoryPlan
from moevement_ext.memory.sizing import Logged, log_ring_bytes, rank_memory, window_lengths
from moevement_ext.memory.window.generations import FileSize
from moevement_ext.replicate.copies import Copies, place_copies
from moevement_ext.replicate.domains import failure_domains

logger = logging.getLogger(__name__)

ALONE = -1
"""Value of `family` without another rank with the same captures."""


class Member(msgspec.Struct, frozen=True):
    """A rank's description of its host memory for the other ranks."""

    node: str
    capacity_bytes: int
    """Size of one of its window files."""
    logged: Logged
    """Logged bytes, for the size of its upstream log."""
    host: str
    """Real host, shared by emulated nodes."""
    salt: bytes
    """Salt of this start's secret; only rank 0's salt is used."""
    domain: str = ''
    """Failure domain by the topology file of its node; empty if not named there."""
    family: int = ALONE
    """Lowest rank with the same captures, itself included."""
    stub_bytes: int = 0
    """Size of a twin's stub file for its windows."""
    slot_bytes: int = 0
    """Mean slot size in the first windows of the job."""
    shorter: list[tuple[int, int]] = []
    """`capacity_bytes` and `stub_bytes` for each of `window_lengths`; empty: only one length."""

    def sized_for(self, window: int, longest: int) -> 'Member':
        """This rank with files for W = `window`; `longest` is the W of `capacity_bytes`."""
        if not self.shorter:
            return self
        place = bisect_left(window_lengths(longest), min(window, longest))
        capacity, stub = self.shorter[place]
        return msgspec.structs.replace(self, capacity_bytes=capacity, stub_bytes=stub, shorter=[])


def copies_of(members: Sequence[Member], topology: str | None, replicas: int) -> Copies:
    """Place the copies of all ranks' windows, at the ranks' places at the start of the job.

    Raises `ConfigurationError` if the topology file is wrong.
    """
    families = [
        rank if member.family == ALONE else member.family for rank, member in enumerate(members)
    ]
    return place_copies(_domains_of(members, topology), replicas, families)


def _domains_of(members: Sequence[Member], topology: str | None) -> list[str]:
    """Failure domains by rank, from the members: a replacement's node may lack the file."""
    told = [member.domain for member in members]
    if topology is not None and all(told):
        return told
    return failure_domains([member.node for member in members], topology)


def warn_of_same_names(members: Sequence[Member]) -> None:
    """Warn of nodes that are several hosts, such as machines that are all called localhost."""
    hosts: dict[str, set[str]] = {}
    for member in members:
        hosts.setdefault(member.node, set()).add(member.host)
    for name in sorted(name for name, found in hosts.items() if len(found) > 1):
        logger.warning(
            'sparse checkpointing: several hosts are called %r: they count as one node, and hold '
            'no copies of each other. Set MOEVEMENT_NODE to another name on each',
            name,
        )


def hosted_by(
    rank: int, members: Sequence[Member], holders: Sequence[Collection[int]]
) -> dict[int, int]:
    """Window file bytes by owner, for the owners with replicas on `rank`."""
    return {
        owner: members[owner].capacity_bytes for owner, peers in enumerate(holders) if rank in peers
    }


def stubs_at(
    rank: int, members: Sequence[Member], twins: Sequence[Collection[int]]
) -> dict[int, int]:
    """Stub file bytes by owner, for the owners with `rank` as a twin."""
    return {owner: members[owner].stub_bytes for owner, of in enumerate(twins) if rank in of}


def file_sizes(longest: dict[int, int], present: dict[int, int]) -> dict[int, FileSize]:
    """Sizes of files by owner, for the longest and for the current windows."""
    return {owner: FileSize(size, present[owner]) for owner, size in longest.items()}


def log_bytes(
    member: Member, members: Sequence[Member], longest_window: int, log_lag: float
) -> int:
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

    `longest_window` is the W that window files and logs are sized for, `log_lag` as in
    `log_ring_bytes`. With `to_disk` windows are copied to disk. The rank `holds_none` holds no
    replicas despite the placement.
    """
    ranks, sizes = {}, set[int]()
    for rank, member in enumerate(members):
        if member.node != node:
            continue
        kept: list[int] = []
        if rank != holds_none:
            kept += hosted_by(rank, members, copies.holders).values()
            kept += stubs_at(rank, members, copies.twins).values()
        log = log_bytes(member, members, longest_window, log_lag)
        ranks[rank] = rank_memory(member.capacity_bytes, kept, log, to_disk)
        sizes.update([member.capacity_bytes, *kept])
    return HostMemoryPlan(ranks, sizes)
