# SPDX-License-Identifier: Apache-2.0
"""Which peers hold copies of a rank's captured state, and what that survives.

Every rank computes the whole placement from the same failure domains, without communication.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import batched, combinations
from math import comb

import numpy as np

LinkCost = Callable[[int, int], float]
"""Distance from an owner (rank) to a holder (rank); smaller is cheaper."""

ENUMERATION_LIMIT = 200_000
_CHUNK = 4096


def place_replicas(
    domains: Sequence[str],
    replicas: int,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    distance: LinkCost | None = None,
) -> list[tuple[int, ...]]:
    """Ranks that hold the copies of each rank's state, indexed by owner.

    `domains[rank]` names what fails as a whole (a node, a rack). The copies and the owner are all
    in different domains; where there are fewer other domains than `replicas`, an owner has fewer
    holders, down to none. Ranks are loaded as equally as that allows, all exactly alike where
    domains are of one size. Between placements that load alike (whole turns of the ring of domains,
    not every permutation) the one with fewest holders in their owner's group of `groups` is taken
    (ranks with the same state are copies already), then the one with the smallest total `distance`.
    """
    if replicas < 0:
        raise ValueError(f"replicas is {replicas}; it must be 0 or more")
    sizes = Counter(domains)
    copies = min(replicas, max(0, len(sizes) - 1))
    if copies == 0:
        return [()] * len(domains)
    group = _group_of_rank(len(domains), groups or ())
    largest = max(sizes.values())
    if (copies + 1) * largest <= len(domains):
        return _rotate(domains, copies, largest, group, distance)
    return _least_loaded(domains, copies, group, distance)


def survival_probability(
    domains: Sequence[str],
    holders: Sequence[Sequence[int]],
    failed_domains: int,
    *,
    samples: int = 100_000,
    seed: int = 0,
) -> float:
    """Probability that `failed_domains` domains lost at once leave a copy of every rank's state.

    A rank's state survives in the owner or in any of its `holders`; every set of domains is equally
    likely. Exact up to ENUMERATION_LIMIT sets, else estimated from `samples` sets.
    """
    names = sorted(set(domains))
    if not 0 <= failed_domains <= len(names):
        raise ValueError(f"failed_domains is {failed_domains}, of {len(names)} domains")
    index = {name: position for position, name in enumerate(names)}
    kept = np.zeros((len(domains), len(names)), dtype=np.float32)
    for owner, held_by in enumerate(holders):
        kept[owner, [index[domains[rank]] for rank in (owner, *held_by)]] = 1
    kept = np.unique(kept, axis=0)
    if comb(len(names), failed_domains) <= ENUMERATION_LIMIT:
        sets: Iterable[np.ndarray] = _all_sets(len(names), failed_domains)
    else:
        sets = _random_sets(len(names), failed_domains, samples, seed)
    survived = tried = 0
    for failed in sets:
        lost = failed @ kept.T == kept.sum(axis=1)
        survived += int((~lost.any(axis=1)).sum())
        tried += len(failed)
    return survived / tried


def _group_of_rank(ranks: int, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Group index of each rank, int64 (ranks,); a rank in none has a negative one of its own."""
    group = -1 - np.arange(ranks)
    for index, members in enumerate(groups):
        group[list(members)] = index
    return group


def _rotate(
    domains: Sequence[str],
    copies: int,
    largest: int,
    group: np.ndarray,
    distance: LinkCost | None,
) -> list[tuple[int, ...]]:
    """Placement by turning the ring of ranks, domain after domain.

    A turn is a permutation, so it loads every rank alike. Turns by multiples of the largest domain
    that stop as far short of a full circle take a rank out of its own domain, and no two of them
    lead into the same one.
    """
    first = {domain: rank for rank, domain in reversed(list(enumerate(domains)))}
    ring = np.array(sorted(range(len(domains)), key=lambda rank: (first[domains[rank]], rank)))

    def price(turn: int) -> tuple[int, float]:
        holders = np.roll(ring, -turn)
        same_group = int((group[ring] == group[holders]).sum())
        pairs = zip(ring.tolist(), holders.tolist(), strict=True)
        return same_group, sum(distance(*pair) for pair in pairs) if distance else 0.0

    turns = sorted(range(largest, len(ring) - largest + 1, largest), key=price)[:copies]
    holders = np.empty((len(ring), copies), dtype=np.int64)
    holders[ring] = np.stack([np.roll(ring, -turn) for turn in turns], axis=1)
    return [tuple(row) for row in holders.tolist()]


def _least_loaded(
    domains: Sequence[str], copies: int, group: np.ndarray, distance: LinkCost | None
) -> list[tuple[int, ...]]:
    """Placement where one domain is so large that no turn of the ring leaves it.

    Owners in large domains have the least choice, so they choose first.
    """
    sizes = Counter(domains)
    load = [0] * len(domains)
    holders: list[list[int]] = [[] for _ in domains]

    def price(owner: int, holder: int) -> tuple[int, bool, float, int]:
        length = distance(owner, holder) if distance else 0.0
        return load[holder], bool(group[owner] == group[holder]), length, holder

    for _ in range(copies):
        for owner in sorted(range(len(domains)), key=lambda rank: -sizes[domains[rank]]):
            used = {domains[rank] for rank in (owner, *holders[owner])}
            allowed = [rank for rank, domain in enumerate(domains) if domain not in used]
            holder = min(allowed, key=lambda rank: price(owner, rank))
            holders[owner].append(holder)
            load[holder] += 1
    return [tuple(chosen) for chosen in holders]


def _all_sets(count: int, failed: int) -> Iterator[np.ndarray]:
    for chunk in batched(combinations(range(count), failed), _CHUNK):
        yield _one_hot(np.array(chunk, dtype=np.int64).reshape(len(chunk), failed), count)


def _random_sets(count: int, failed: int, samples: int, seed: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(seed)
    for start in range(0, samples, _CHUNK):
        order = generator.random((min(_CHUNK, samples - start), count)).argpartition(failed, axis=1)
        yield _one_hot(order[:, :failed], count)


def _one_hot(chosen: np.ndarray, count: int) -> np.ndarray:
    """float32 (sets, count), 1 at the indices of each row of `chosen` (sets, failed)."""
    sets = np.zeros((len(chosen), count), dtype=np.float32)
    np.put_along_axis(sets, chosen, 1, axis=1)
    return sets
