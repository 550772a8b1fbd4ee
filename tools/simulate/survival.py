# SPDX-License-Identifier: Apache-2.0
"""What a placement of replicas is worth: how likely random failures lose nothing."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moevement_ext.replicate.placement import (
    LinkCost,
    is_exact,
    place_replicas,
    survival_probability,
)


@dataclass(frozen=True)
class Survival:
    """Loss of some domains at once, all sets of them alike."""

    failed: int
    """Domains lost."""
    probability: float
    """Probability that a copy of every rank's state is left."""
    standard_error: float
    """Standard error of the probability; 0 only where it was found by enumeration."""


@dataclass(frozen=True)
class Placed:
    """Placement with one number of replicas."""

    replicas: int
    """Copies in other domains that were asked for."""
    holders: int
    """Ranks that hold a copy of a rank's state, beyond those of its own group; the least."""
    load: tuple[int, int]
    """Least and greatest number of owners whose copies a rank holds."""
    mean_distance: float | None
    """Mean distance from owners to holders; None without a distance or holders."""
    survival: list[Survival]


def survival_report(
    domains: Sequence[str],
    failed: Iterable[int],
    *,
    replicas: Iterable[int] = (1, 2, 3),
    groups: Sequence[Sequence[int]] | None = None,
    distance: LinkCost | None = None,
    samples: int = 100_000,
    seed: int = 0,
) -> list[Placed]:
    """Placements by `place_replicas` for each of `replicas`, and what `failed` domains do to them.

    Raises:
        ValueError: more domains are to fail than there are, or replicas are negative.
    """
    failed = list(failed)
    return [_placed(domains, count, failed, groups, distance, samples, seed) for count in replicas]


def _placed(
    domains: Sequence[str],
    replicas: int,
    failed: Iterable[int],
    groups: Sequence[Sequence[int]] | None,
    distance: LinkCost | None,
    samples: int,
    seed: int,
) -> Placed:
    holders = place_replicas(domains, replicas, groups=groups, distance=distance)
    held = Counter(rank for held_by in holders for rank in held_by)
    loads = [held[rank] for rank in range(len(domains))]
    links = [(owner, rank) for owner, held_by in enumerate(holders) for rank in held_by]
    survival = []
    for lost in failed:
        probability = survival_probability(
            domains, holders, lost, groups=groups, samples=samples, seed=seed
        )
        exact = is_exact(len(set(domains)), lost)
        # Two more of each kind: samples that all survived prove nothing (Agresti and Coull).
        share = (probability * samples + 2) / (samples + 4)
        error = 0.0 if exact else math.sqrt(share * (1 - share) / (samples + 4))
        survival.append(Survival(lost, probability, error))
    return Placed(
        replicas,
        min(map(len, holders), default=0),
        (min(loads, default=0), max(loads, default=0)),
        sum(distance(*link) for link in links) / len(links) if distance and links else None,
        survival,
    )
