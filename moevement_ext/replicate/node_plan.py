# SPDX-License-Identifier: Apache-2.0
"""Host memory of a rank, and of a node's ranks from the descriptions of all ranks."""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from moevement_ext.config import node_name
from moevement_ext.logger import logger_of
from moevement_ext.memory import budget
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.file_system import file_system_of
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.twin import OwnParts
from moevement_ext.replicate.own_address import host_identity
from moevement_ext.replicate.placement import Copies, failure_domains, own_domain, place_copies
from moevement_ext.replicate.secret import new_secret

logger = logger_of(__name__)

ALONE = -1
"""Value of `family` without another rank with the same captures."""


class Member(msgspec.Struct, kw_only=True, frozen=True):
    """A rank's description of its host memory for the other ranks."""

    node: str
    capacity_bytes: int
    """Size of one of its window files."""
    logged: budget.Logged
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
    memory: str = ''
    """File system of its windows; nodes of one host may share it."""

    def sized_for(self, window: int, longest: int) -> 'Member':
        """This rank with files for W = `window`; `longest` is the W of `capacity_bytes`."""
        if not self.shorter:
            return self
        place = bisect_left(budget.window_lengths(longest), min(window, longest))
        capacity, stub = self.shorter[place]
        return msgspec.structs.replace(self, capacity_bytes=capacity, stub_bytes=stub, shorter=[])


class Share(NamedTuple):
    """Contents and sizes of one rank's host memory."""

    identity: RankIdentity
    capacity_bytes: int
    """Size of one window file of this rank."""
    logged: budget.Logged = budget.NOTHING_LOGGED
    hosts_replicas: bool = True
    """Hold the replicas placed here; otherwise their owners have one copy fewer."""
    disk: DiskWindows | None = None
    longest_window: int | None = None
    """The W that all sizes are for; None: as configured."""
    window: int | None = None
    """The first W, for which files and log have room; None: the longest."""
    shorter: Sequence[tuple[int, int]] = ()
    """This and the next three: see `Member`."""
    family: int = ALONE
    stub_bytes: int = 0
    slot_bytes: int = 0
    own_parts: OwnParts = frozenset()
    """Parts that may differ at a twin."""


def described(share: Share, topology: str | None, directory: Path) -> Member:
    """The description of this rank, with windows in `directory`, and a new salt."""
    return Member(
        node=node_name(),
        capacity_bytes=share.capacity_bytes,
        logged=share.logged,
        host=host_identity(),
        salt=new_secret(),
        domain=own_domain(node_name(), topology),
        family=share.family,
        stub_bytes=share.stub_bytes,
        slot_bytes=share.slot_bytes,
        shorter=list(share.shorter),
        memory=f'{host_identity()}/{file_system_of(directory)}',
    )


def copies_of(members: Sequence[Member], topology: str | None, replicas: int) -> Copies:
    """Place the copies of all ranks' windows, at the ranks' places at the start of the job.

    Raises `ConfigurationError` if the topology file is wrong.
    """
    families = [
        rank if member.family == ALONE else member.family for rank, member in enumerate(members)
    ]
    domains = [member.domain for member in members]  # a replacement's node may lack the file
    if topology is None or not all(domains):
        domains = failure_domains([member.node for member in members], topology)
    return place_copies(domains, replicas, families)


def warn_of_same_names(members: Sequence[Member]) -> None:
    """Warn if several hosts have one node name, such as machines that are all called localhost."""
    hosts: dict[str, set[str]] = {}
    for member in members:
        hosts.setdefault(member.node, set()).add(member.host)
    for name in sorted(name for name, found in hosts.items() if len(found) > 1):
        logger.warning(
            'several hosts are called %r: they count as one node, and hold no copies of each '
            'other. Set MOEVEMENT_NODE to another name on each',
            name,
        )


class JobMemory(NamedTuple):
    """Host memory of a job by the descriptions of its ranks: what each keeps, and what that takes.

    A `window` is the W that files and logs are sized for.
    """

    members: list[Member]
    copies: Copies
    longest_window: int
    """The W of `Member.capacity_bytes`."""
    log_lag: float
    """`lag` of `log_ring_bytes`."""
    to_disk: bool
    """Windows are copied to disk."""
    holds_none: int | None = None
    """Rank that holds no replicas despite the placement."""

    def sized(self, rank: int, window: int) -> Member:
        return self.members[rank].sized_for(window, self.longest_window)

    def held_by(self, rank: int, window: int) -> dict[int, int]:
        """File bytes by owner of the copies on `rank`: of a window, or of a twin's stub."""
        sizes = {}
        for owner in range(len(self.members)) if rank != self.holds_none else ():
            if rank in self.copies.holders[owner]:
                sizes[owner] = self.sized(owner, window).capacity_bytes
            elif rank in self.copies.twins[owner]:
                sizes[owner] = self.sized(owner, window).stub_bytes
        return sizes

    def log_bytes(self, rank: int, window: int) -> int:
        """Size of a rank's upstream log, which no longer window enlarges further."""
        most = max((other.logged for other in self.members), key=lambda it: it.iteration_bytes)
        longest = min(window, self.longest_window)
        return budget.log_ring_bytes(self.members[rank].logged, most, longest, self.log_lag)

    def of_node(self, node: str, window: int, shared: bool = False) -> budget.HostMemoryPlan:
        """Bytes of every rank on a node; if `shared`, with those of nodes in its file system."""
        ranks, sizes = {}, set[int]()
        here = {member.memory for member in self.members if member.node == node and shared}
        for rank, member in enumerate(self.members):
            if member.node == node or member.memory in here:
                capacity = self.sized(rank, window).capacity_bytes
                kept = self.held_by(rank, window).values()
                log = self.log_bytes(rank, window)
                ranks[rank] = budget.rank_memory(capacity, kept, log, self.to_disk)
                sizes.update([capacity, *kept])
        nodes = {rank: self.members[rank].node for rank in ranks}
        others = {rank: name for rank, name in nodes.items() if name != node}
        return budget.HostMemoryPlan(ranks, sizes, others)
