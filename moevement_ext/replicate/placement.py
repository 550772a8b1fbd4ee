# SPDX-License-Identifier: Apache-2.0
"""Placement of copies of a rank's captured state.

Every rank computes the whole placement from the same failure domains, without communication.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

LinkCost = Callable[[int, int], float]
"""Distance from an owner (rank) to a holder (rank); smaller is cheaper."""


def place_replicas(
    domains: Sequence[str],
    replicas: int,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    distance: LinkCost | None = None,
) -> list[tuple[int, ...]]:
    """Ranks that hold the copies of each rank's state, indexed by owner.

    A failure domain fails as a whole (a node, a rack). The copies and the owner are all in
    different domains; with fewer other domains than `replicas`, an owner has fewer holders,
    down to none. Within these rules, ranks get equal loads, exactly equal if all domains have
    the same size.

    Ranks with the same captures count as copies: the number of holders is that of the rank with
    the fewest such copies in other domains, and holders avoid the domains of the owner's group
    if possible. Of placements with equal loads the one with cheaper links is taken: first the
    best turns of the ring of domains, then exchanges of two holders as long as one helps (a
    local optimum). With `groups` or `distance`, time and memory grow with the square of the
    ranks.

    Args:
        domains: failure domain of each rank.
        replicas: copies of each rank's state on other ranks; not negative.
        groups: ranks that capture the same (see `copies`).
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
