# SPDX-License-Identifier: Apache-2.0
"""Placement of the copies of each rank's windows on twins and holders.

A *twin* captures the same state anyway, like peers with the same shard; the owner sends it only the
few different bytes (`memory.window.twin`). Holders receive whole windows. The requested copies of a
rank are in different failure domains, none of them the rank's own, so that the loss of one domain
never destroys all copies. Every rank computes the whole placement from the same failure domains,
without communication.

Failure domains are sets of nodes that fail together. A topology file gives each node its failure
domain, with or without the levels above it: `"rack7"`, `["rack7", "pod2"]` or, as a path,
`"pod2/rack7"`. Nodes with the same whole path fail together.
"""

import json
from collections.abc import Sequence
from heapq import heapreplace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moevement_ext.config import ConfigurationError

LEVELS = '/'
"""Separator between the levels of a failure domain, the outermost first."""


def own_domain(node: str, topology: str | None) -> str:
    """Failure domain of one node; empty if the topology file does not name it."""
    try:
        return failure_domains([node], topology)[0]
    except ConfigurationError:
        return ''


def failure_domains(nodes: Sequence[str], topology: str | None) -> list[str]:
    """Failure domain of each rank: its node, unless a topology file says otherwise.

    Raises `ConfigurationError` if the file is unreadable, does not name every node, or has
    different numbers of levels.
    """
    if topology is None:
        return list(nodes)
    try:
        mapping = json.loads(Path(topology).read_text())
        domains = {str(node): _path(str(node), levels) for node, levels in mapping.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f'--sparse-ckpt-topology {topology}: expected a JSON object '
            f'{{"node name": "failure domain"}}, or ["failure domain", "level above", ...]: {error}'
        ) from error
    depths = {domain.count(LEVELS) + 1: node for node, domain in domains.items()}
    if len(depths) > 1:
        (few, one), *_, (many, other) = sorted(depths.items())
        raise ConfigurationError(
            f'--sparse-ckpt-topology {topology}: {one!r} has {few} levels and {other!r} {many}; '
            'give all nodes the same number.'
        )
    missing = sorted(set(nodes) - domains.keys())
    if missing:
        raise ConfigurationError(
            f'--sparse-ckpt-topology {topology} does not name the nodes {missing}; add them.'
        )
    return [domains[node] for node in nodes]


def _path(node: str, levels: object) -> str:
    """Format a failure domain as a path, the outermost level first."""
    levels = str(levels) if isinstance(levels, int) else levels
    names = levels.split(LEVELS) if isinstance(levels, str) else levels
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise ValueError(f'{node!r} has {json.dumps(levels)}; give names that are not empty')
    if any(LEVELS in name for name in names):
        raise ValueError(f'{node!r}: a name in a list has a {LEVELS!r}; leave it out')
    return LEVELS.join(names if isinstance(levels, str) else reversed(names))


def place_replicas(domains: Sequence[str], replicas: int) -> list[tuple[int, ...]]:
    """Ranks that hold the copies of each rank's state, indexed by owner.

    `domains` are the failure domains of the ranks, `replicas` the copies of each rank's state on
    other ranks, not negative. The copies and the owner are all in different domains; with fewer
    other domains than `replicas`, an owner has fewer holders, down to none. Within these rules,
    ranks get equal loads, exactly equal if all domains have the same size.
    """
    if replicas < 0:
        raise ValueError(f'replicas is {replicas}; it must be 0 or more')
    of_rank = _numbered(domains)
    sizes = np.bincount(of_rank, minlength=1)
    copies = min(replicas, len(sizes) - 1)
    if copies == 0:
        return [()] * len(domains)
    crowded = (copies + 1) * int(sizes.max()) > len(domains)
    holders = (_least_loaded if crowded else _rotated)(of_rank, sizes, copies)
    return [tuple(row) for row in holders.tolist()]


def _numbered(domains: Sequence[str]) -> np.ndarray:
    """Number of each rank's domain, in the order of their first ranks; int64 (ranks,)."""
    index = {name: number for number, name in enumerate(dict.fromkeys(domains))}
    return np.array([index[name] for name in domains], dtype=np.int64)


def _rotated(of_rank: np.ndarray, sizes: np.ndarray, copies: int) -> np.ndarray:
    """Placement by turning the ring of ranks, domain after domain; int64 (ranks, copies).

    A turn is a permutation, so it loads every rank equally. Turns by multiples of the largest
    domain's size that stop as far short of a full circle move each rank out of its own domain,
    and no two of them lead into the same domain.
    """
    ring, largest = np.argsort(of_rank, kind='stable'), int(sizes.max())
    holders = np.empty((len(ring), copies), dtype=np.int64)
    turns = range(largest, (copies + 1) * largest, largest)
    holders[ring] = np.stack([np.roll(ring, -turn) for turn in turns], axis=1)
    return holders


def _least_loaded(of_rank: np.ndarray, sizes: np.ndarray, copies: int) -> np.ndarray:
    """Placement with a domain so large that no turn of the ring leaves it.

    Owners in large domains have the least choice, so they choose first.
    """
    load = np.zeros(len(of_rank), dtype=np.int64)
    holders = np.empty((len(of_rank), copies), dtype=np.int64)
    for copy in range(copies):
        for owner in np.argsort(-sizes[of_rank], kind='stable').tolist():
            used = of_rank[np.append(holders[owner, :copy], owner)]
            free = np.flatnonzero(~np.isin(of_rank, used))
            holders[owner, copy] = holder = free[load[free].argmin()]
            load[holder] += 1
    return holders


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
    twins: list[tuple[int, ...]] = [()] * len(domains)
    levelled = any(LEVELS in name for name in names)
    if replicas < 1 or not (levelled or len(groups) < len(domains)):
        return Copies(twins, place_replicas(domains, replicas))
    of_rank, distance = _numbered(domains), _distances(names)
    for group in groups.values():
        ring = np.array(group)
        for place, rank in enumerate(group):
            twins[rank] = _twins(np.roll(ring, -place), of_rank, distance, replicas)
    return Copies(twins, _holders(twins, of_rank, distance, min(replicas, len(names) - 1)))


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


def _holders(
    twins: Sequence[tuple[int, ...]], of_rank: np.ndarray, distance: np.ndarray, wanted: int
) -> list[tuple[int, ...]]:
    """Choose holders for the copies that twins lack, in domains without a copy.

    One copy of each owner after the other: ranks that hold less than their share, the nearest
    first, and then the ranks that hold the least; of several, the next after the owner.
    """
    ranks = len(of_rank)
    missing = [wanted - len(held_by) for held_by in twins]
    share = -(-sum(missing) // max(1, ranks))
    # The order within a domain, by load and then number, is that of load * ranks + number.
    heaps: list[list[int]] = [[] for _ in distance]
    for number, domain in enumerate(of_rank.tolist()):
        heaps[domain].append(number)
    # Only the first of each domain is compared: jobs have far more ranks than domains.
    first = np.array([heap[0] for heap in heaps])
    farther, apart = distance.max() + 1, (ranks + 1) * ranks
    holders: list[list[int]] = [[] for _ in twins]
    for copy in range(max(missing)):
        for owner in (owner for owner, count in enumerate(missing) if copy < count):
            taken = [int(of_rank[rank]) for rank in (owner, *twins[owner], *holders[owner])]
            away = np.where(first >= share * ranks, farther, distance[of_rank[owner]])
            order = away * apart + first // ranks * ranks + (first - owner) % ranks
            order[taken] = farther * apart + apart
            domain = int(order.argmin())
            holders[owner].append(int(first[domain]) % ranks)
            heapreplace(heaps[domain], int(first[domain]) + ranks)
            first[domain] = heaps[domain][0]
    return [tuple(held_by) for held_by in holders]
