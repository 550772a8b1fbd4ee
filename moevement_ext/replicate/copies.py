# SPDX-License-Identifier: Apache-2.0
"""Placement of the copies of each rank's windows on twins and holders.

A *twin* captures the same state anyway, like peers with the same shard; the owner sends it only the
few different bytes (`memory.window.twin`). Holders receive whole windows. The requested copies of a
rank are in different failure domains, none of them the rank's own, so that the loss of one domain
never destroys all copies. Every rank computes the whole placement from the same failure domains,
without communication.
"""

from collections.abc import Sequence
from heapq import heappush, heapreplace
from typing import NamedTuple

import numpy as np

from moevement_ext.replicate.domains import LEVELS
from moevement_ext.replicate.placement import place_replicas

MOST_EXCHANGED = 1024
"""Maximum number of ranks for which exchanges improve a placement by distance and groups; their
time and memory grow with the square of this number."""


class Copies(NamedTuple):
    """Ranks that have copies of each rank's windows, by owner."""

    twins: list[tuple[int, ...]]
    """Ranks with the same captures."""
    holders: list[tuple[int, ...]]
    """Ranks that receive whole windows."""

    def least(self) -> int:
        """Number of copies of the rank with the fewest copies."""
        both = zip(self.twins, self.holders, strict=True)
        return min((len(twins) + len(held_by) for twins, held_by in both), default=0)

    def reached(self, owner: int) -> tuple[int, ...]:
        """All ranks that receive data of an owner, twins first."""
        return self.twins[owner] + self.holders[owner]


def place_copies(domains: Sequence[str], replicas: int, families: Sequence[int]) -> Copies:
    """Compute twins and holders of each rank.

    Near ranks are preferred; distance is the number of levels on which two domains differ.
    Within these rules, holders get equal loads.

    Args:
        domains: failure domain of each rank; a path if the topology file names levels.
        replicas: copies of each rank's windows on other ranks; not negative.
        families: for each rank, the lowest rank with the same captures.
    """
    groups: dict[int, list[int]] = {}
    for rank, family in enumerate(families):
        groups.setdefault(family, []).append(rank)
    names = list(dict.fromkeys(domains))
    levelled = any(LEVELS in name for name in names)
    if replicas < 1 or not (levelled or len(groups) < len(domains)):
        return Copies([()] * len(domains), place_replicas(domains, replicas))
    index = {name: number for number, name in enumerate(names)}
    of_rank = np.array([index[name] for name in domains])
    distance = _distances(names)
    twins: list[tuple[int, ...]] = [()] * len(domains)
    for group in groups.values():
        ring = np.array(group)
        for place, rank in enumerate(group):
            twins[rank] = _twins(np.roll(ring, -place), of_rank, distance, replicas)
    proposed: list[tuple[int, ...]] = [()] * len(domains)
    if len(domains) <= MOST_EXCHANGED:
        several = [group for group in groups.values() if len(group) > 1]
        costs = distance[np.ix_(of_rank, of_rank)].tolist()
        proposed = place_replicas(
            domains,
            replicas,
            groups=several,
            distance=(lambda owner, holder: costs[owner][holder]) if levelled else None,
        )
    wanted = min(replicas, len(names) - 1)
    return Copies(twins, _completed(twins, proposed, of_rank, distance, wanted))


def _distances(names: Sequence[str]) -> np.ndarray:
    """Number of levels on which domains differ, int64 (domains, domains)."""
    paths = [name.split(LEVELS) for name in names]
    depth = max(map(len, paths), default=0)
    distance = np.zeros((len(names), len(names)), dtype=np.int64)
    apart = np.zeros_like(distance, dtype=bool)
    for level in range(depth):  # from the outermost; below a different level all levels differ
        at = np.unique([LEVELS.join(path[: level + 1]) for path in paths], return_inverse=True)[1]
        apart |= at[:, None] != at
        distance += apart
    return distance


def _twins(
    ring: np.ndarray, of_rank: np.ndarray, distance: np.ndarray, most: int
) -> tuple[int, ...]:
    """Choose the nearest twins, at most one in each other domain, at most `most`.

    `ring` has the ranks with the same captures, the owner first. Among equally near ranks the next
    in the ring is chosen, so that all are twins equally often.
    """
    home = of_rank[ring[0]]
    away = distance[home, of_rank[ring]]
    found: dict[int, int] = {}
    for rank in ring[np.argsort(away, kind='stable')].tolist():
        if of_rank[rank] != home:
            found.setdefault(int(of_rank[rank]), rank)
        if len(found) == most:
            break
    return tuple(found.values())


def _completed(
    twins: Sequence[tuple[int, ...]],
    proposed: Sequence[tuple[int, ...]],
    of_rank: np.ndarray,
    distance: np.ndarray,
    wanted: int,
) -> list[tuple[int, ...]]:
    """Choose holders for the missing copies, in domains without a copy.

    Suitable proposed holders come first. Then come ranks that hold less than their share, the
    nearest first, and then the ranks that hold the least.
    """
    load = np.zeros(len(of_rank), dtype=np.int64)
    holders: list[list[int]] = []
    for owner, held_by in enumerate(proposed):
        used = {int(of_rank[rank]) for rank in (owner, *twins[owner])}
        near = sorted(held_by, key=lambda rank: distance[of_rank[owner], of_rank[rank]])
        new = {int(of_rank[rank]): rank for rank in reversed(near) if of_rank[rank] not in used}
        kept = [rank for rank in near if rank in new.values()][: wanted - len(twins[owner])]
        load[kept] += 1
        holders.append(kept)
    missing = [wanted - len(twins[rank]) - len(kept) for rank, kept in enumerate(holders)]
    share = -(-int(load.sum() + sum(missing)) // max(1, len(of_rank)))
    # The order within a domain, by load and then number, is that of load * ranks + number.
    ranks, numbers = len(of_rank), load * len(of_rank) + np.arange(len(of_rank))
    heaps: list[list[int]] = [[] for _ in distance]
    for domain, number in zip(of_rank.tolist(), numbers.tolist(), strict=True):
        heappush(heaps[domain], number)
    # Only the first of each domain is compared: jobs have far more ranks than domains.
    first = np.array([heap[0] for heap in heaps])
    farther, apart = distance.max() + 1, (ranks + 1) * ranks
    for owner, count in enumerate(missing):
        for _ in range(count):
            taken = [int(of_rank[rank]) for rank in (owner, *twins[owner], *holders[owner])]
            away = np.where(first >= share * ranks, farther, distance[of_rank[owner]])
            order = away * apart + first
            order[taken] = farther * apart + apart
            domain = int(order.argmin())
            holders[owner].append(int(first[domain]) % ranks)
            heapreplace(heaps[domain], int(first[domain]) + ranks)
            first[domain] = heaps[domain][0]
    return [tuple(kept) for kept in holders]
