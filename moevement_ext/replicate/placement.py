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
from collections.abc import Callable, Sequence
from heapq import heappush, heapreplace
from itertools import product
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


LinkCost = Callable[[int, int], float]
"""Distance from an owner (rank) to a holder (rank); smaller is cheaper."""

MOST_EXCHANGED = 1024
"""Maximum number of ranks for which exchanges improve a placement by distance and groups; their
time and memory grow with the square of this number."""


def place_replicas(
    domains: Sequence[str],
    replicas: int,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    distance: LinkCost | None = None,
) -> list[tuple[int, ...]]:
    """Ranks that hold the copies of each rank's state, indexed by owner.

    The copies and the owner are all in different domains; with fewer other domains than
    `replicas`, an owner has fewer holders, down to none. Within these rules, ranks get equal
    loads, exactly equal if all domains have the same size.

    Ranks with the same captures count as copies: the number of holders is that of the rank with
    the fewest such copies in other domains, and holders avoid the domains of the owner's group
    if possible. Of placements with equal loads the one with cheaper links is taken: first the
    best turns of the ring of domains, then exchanges of two holders (a local optimum). With
    `groups` or `distance`, time and memory grow with the square of the ranks.

    Args:
        domains: failure domain of each rank.
        replicas: copies of each rank's state on other ranks; not negative.
        groups: ranks that capture the same.
        distance: cost of the link from an owner to a holder.
    """
    if replicas < 0:
        raise ValueError(f'replicas is {replicas}; it must be 0 or more')
    sites = _Domains(domains, groups or ())
    copies = sites.further_copies(replicas)
    if copies == 0:
        return [()] * len(domains)
    prices = sites.prices(distance) if groups or distance else None
    if (copies + 1) * int(sites.sizes.max()) > len(domains):
        holders = _least_loaded(sites, copies, prices)
    else:
        holders = _rotate(sites, copies, prices)
        if prices is not None:
            _exchange(sites, holders, prices)
    return [tuple(row) for row in holders.tolist()]


class _Domains:
    """Domains as numbers, and for each rank the domains that already contain its state."""

    def __init__(self, domains: Sequence[str], groups: Sequence[Sequence[int]]) -> None:
        index = {name: position for position, name in enumerate(dict.fromkeys(domains))}
        self.count = len(index)
        self.of_rank = np.array([index[name] for name in domains], dtype=np.int64)
        self.sizes = np.bincount(self.of_rank, minlength=1)
        self.present = np.eye(self.count, dtype=bool)[self.of_rank]
        """bool (ranks, domains): the domains of the rank itself and of its group."""
        for members in groups:
            self.present[list(members)] = self.present[list(members)].any(axis=0)

    def further_copies(self, replicas: int) -> int:
        """Number of holders of every rank: as many as the rank with the least redundancy needs."""
        if not len(self.of_rank):
            return 0
        others = int(self.present.sum(axis=1).min()) - 1
        return max(0, min(replicas, self.count - 1) - others)

    def prices(self, distance: LinkCost | None) -> np.ndarray:
        """Cost of each holder for each owner, float64 (ranks, ranks); redundant ones cost most."""
        ranks = len(self.of_rank)
        cost = np.zeros((ranks, ranks))
        if distance:
            cost = np.array([[distance(a, b) for b in range(ranks)] for a in range(ranks)], float)
        dearest: float = np.abs(cost).sum()
        return cost + (dearest + 1) * self.present[:, self.of_rank]


def _rotate(domains: _Domains, copies: int, prices: np.ndarray | None) -> np.ndarray:
    """Placement by turning the ring of ranks, domain after domain; int64 (ranks, copies).

    A turn is a permutation, so it loads every rank equally. Turns by multiples of the largest
    domain's size that stop as far short of a full circle move each rank out of its own domain,
    and no two of them lead into the same domain.
    """
    ring = np.argsort(domains.of_rank, kind='stable')
    largest = int(domains.sizes.max())

    def price(turn: int) -> float:
        return float(prices[ring, np.roll(ring, -turn)].sum()) if prices is not None else 0.0

    turns = sorted(range(largest, len(ring) - largest + 1, largest), key=price)[:copies]
    holders = np.empty((len(ring), copies), dtype=np.int64)
    holders[ring] = np.stack([np.roll(ring, -turn) for turn in turns], axis=1)
    return holders


def _exchange(domains: _Domains, holders: np.ndarray, prices: np.ndarray) -> None:
    """Exchange holders of two owners if that is cheaper and keeps all domains different.

    Exchanges do not change loads. Changes `holders` in place, to a local optimum.
    """
    prices = prices.copy()
    prices[domains.of_rank[:, None] == domains.of_rank] = np.inf
    owners = np.arange(len(holders))
    improved = True
    while improved:
        improved = False
        for copy, owner in product(range(holders.shape[1]), range(len(holders))):
            column = holders[:, copy]
            others = domains.of_rank[np.delete(holders, copy, axis=1)]
            theirs = domains.of_rank[column]
            clash = (others[owner] == theirs[:, None]).any(axis=1)
            clash |= (others == theirs[owner]).any(axis=1)
            now = prices[owner, column[owner]] + prices[owners, column]
            gain = now - prices[owner, column] - prices[owners, column[owner]]
            gain[clash] = -np.inf
            best = int(gain.argmax())
            if gain[best] > 1e-9 * now[best]:
                column[[owner, best]] = column[[best, owner]]
                improved = True


def _least_loaded(domains: _Domains, copies: int, prices: np.ndarray | None) -> np.ndarray:
    """Placement with a domain so large that no turn of the ring leaves it.

    Owners in large domains have the least choice, so they choose first.
    """
    ranks = len(domains.of_rank)
    load = np.zeros(ranks, dtype=np.int64)
    holders = np.empty((ranks, copies), dtype=np.int64)
    for copy in range(copies):
        for owner in np.argsort(-domains.sizes[domains.of_rank], kind='stable').tolist():
            used = domains.of_rank[np.append(holders[owner, :copy], owner)]
            free = np.flatnonzero(~np.isin(domains.of_rank, used))
            price = prices[owner, free] if prices is not None else np.zeros(len(free))
            holder = free[np.lexsort((price, load[free]))[0]]
            holders[owner, copy] = holder
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
