# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts on nodes, and the probability that they survive failures.

Maximum rank overlap is the placement of Lazarus (Wu et al., arXiv 2407.04656): experts are sorted
by their number of replicas and divided into groups of as many experts as a node has slots; the
first of a group, its representative, has the fewest replicas. Each group gets as many nodes as its
representative has replicas, with all of the group's experts on each node. Experts that fail
together count once, so few sets of failed nodes lose an expert. The placement is optimal if the
nodes of all representatives exist (docs/paper.md).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import batched, combinations

import numpy as np

Placement = list[tuple[int, ...]]
"""Experts in the slots of each node."""

ENUMERATION_LIMIT = 200_000
SAMPLES = 100_000
"""Sets of failed domains that are drawn where there are too many to enumerate."""
_CHUNK = 4096


def copies_survival(kept: np.ndarray, failed_domains: int) -> float:
    """Probability that each item keeps a copy when `failed_domains` random domains are lost.

    `kept` is bool, shape [items, domains]: whether a domain has a copy of an item. Exact, by
    enumeration, where `is_exact`, else from random sets.
    """
    domains = kept.shape[1]
    if not 0 <= failed_domains <= domains:
        raise ValueError(f'{failed_domains} failed: there are {domains} nodes')
    kept = np.unique(kept, axis=0).astype(np.float32)
    sets = _all_sets if is_exact(domains, failed_domains) else _random_sets
    survived = tried = 0
    for chosen in sets(domains, failed_domains):
        failed = np.zeros((len(chosen), domains), dtype=np.float32)
        np.put_along_axis(failed, chosen, 1, axis=1)
        lost = failed @ kept.T == kept.sum(axis=1)
        survived += int((~lost.any(axis=1)).sum())
        tried += len(failed)
    return survived / tried


def is_exact(domains: int, failed_domains: int) -> bool:
    """True if a survival probability is found by enumeration, not by sampling."""
    return math.comb(domains, failed_domains) <= ENUMERATION_LIMIT


def _all_sets(count: int, failed: int) -> Iterator[np.ndarray]:
    """Every set of `failed` of `count`, int64 (sets, failed) at a time."""
    for chunk in batched(combinations(range(count), failed), _CHUNK):
        yield np.array(chunk, dtype=np.int64).reshape(len(chunk), failed)


def _random_sets(count: int, failed: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    for start in range(0, SAMPLES, _CHUNK):
        order = generator.random((min(_CHUNK, SAMPLES - start), count)).argpartition(failed, axis=1)
        yield order[:, :failed]


# ---- replicas of experts


def allocate_replicas(tokens: Sequence[float], nodes: int, slots: int, least: int = 1) -> list[int]:
    """Replicas of each expert, by its token share but at least `least` >= 1 (Lazarus, sec. 4).

    Experts take their shares of the remaining slots, those with the fewest tokens first; the last
    expert takes the remainder, so that all `nodes` x `slots` slots are used.
    """
    total = nodes * slots
    if len(tokens) * least > total:
        raise ValueError(
            f'{len(tokens)} experts with at least {least} replicas need more than the {total} '
            f'slots of {nodes} nodes; lower least, or add nodes or slots'
        )
    replicas = [0] * len(tokens)
    free, load = total, float(sum(tokens))
    order = sorted(range(len(tokens)), key=lambda expert: tokens[expert])
    for position, expert in enumerate(order):
        later = (len(order) - position - 1) * least
        share = free * tokens[expert] / load if load else free / (len(order) - position)
        replicas[expert] = min(max(int(share), least), free - later) if later else free
        free -= replicas[expert]
        load -= tokens[expert]
    return replicas


def maximum_rank_overlap(replicas: Sequence[int], nodes: int, slots: int) -> Placement:
    """Lazarus' placement of experts with `replicas` each on `nodes` of `slots` slots."""
    order = sorted(range(len(replicas)), key=lambda expert: replicas[expert])
    held: list[list[int]] = [[] for _ in range(nodes)]
    first = 0
    for group in batched(order, slots):
        last = min(nodes, first + replicas[group[0]])
        for node in held[first:last]:
            node.extend(group)
        first = last
    placed = Counter(expert for node in held for expert in node)
    for expert in order:
        for _ in range(replicas[expert] - placed[expert]):
            _put(expert, held, slots, range(nodes))
    return [tuple(node) for node in held]


def spread(replicas: Sequence[int], nodes: int, slots: int, seed: int = 0) -> Placement:
    """Put each replica on a node with most free slots and no such replica; ties drawn by `seed`.

    A placement that balances slots and ignores failures.
    """
    random = np.random.default_rng(seed)
    held: list[list[int]] = [[] for _ in range(nodes)]
    for expert in sorted(range(len(replicas)), key=lambda expert: -replicas[expert]):
        for _ in range(replicas[expert]):
            _put(expert, held, slots, random.permutation(nodes).tolist())
    return [tuple(node) for node in held]


def recovery_probability(placement: Placement, failed_nodes: int) -> float:
    """Probability that `failed_nodes` random nodes leave a replica of each placed expert.

    Exact by enumeration for small numbers (see `is_exact`), else sampled.
    """
    experts = max((expert for node in placement for expert in node), default=-1) + 1
    kept = np.zeros((experts, len(placement)), dtype=bool)
    for node, held in enumerate(placement):
        kept[list(held), node] = True
    return copies_survival(kept[kept.any(axis=1)], failed_nodes)


def _put(expert: int, held: list[list[int]], slots: int, ties: Sequence[int]) -> None:
    """Put an expert on the emptiest node with a free slot, preferably one without the expert."""
    free = [node for node in ties if len(held[node]) < slots]
    held[min(free, key=lambda node: (expert in held[node], len(held[node])))].append(expert)
