# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts in the slots of nodes: the placement of Lazarus (arXiv 2407.04656).

An expert gets replicas by its share of the tokens. With *maximum rank overlap* experts are sorted
by their number of replicas and divided into groups of as many as a node has slots; each group gets
as many nodes as its first expert has replicas, with all of the group's experts on each node.
Experts that fail together count once, so few sets of failed nodes lose an expert: the placement is
optimal if there are nodes for the first experts of all groups.

All functions are deterministic: ranks with the same token counts reach the same placement.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import batched
from typing import NamedTuple

import numpy as np

from moevement_ext.config import ConfigurationError

type Placement = Sequence[Sequence[int]]
"""Experts in the slots of each node. An expert may have several slots of a node."""


class NewExpert(NamedTuple):
    """An expert gets into slots of a node that had another one."""

    expert: int
    source: int
    """A node that had it before; the node itself if possible."""
    target: int
    slots: list[int]


def place(
    tokens: Sequence[float], nodes: int, slots: int, least: int, before: Placement | None = None
) -> list[tuple[int, ...]]:
    """Place the experts of a layer, by the `tokens` of each, on `nodes` with `slots` each.

    Every expert is on as many nodes as are `feasible`, where slots permit it. With the placement
    `before` of the layer, few experts are new on a node, and those that stay keep their slots.
    """
    least = feasible(len(tokens), nodes, slots, least)
    rows = maximum_rank_overlap(allocate(tokens, nodes * slots, least), nodes, slots)
    _spread_few(rows, least)
    return [*map(tuple, rows if before is None else _kept(rows, before))]


def moves(before: Placement, after: Placement) -> list[NewExpert]:
    """The moves that make `after` of `before`: holders of an expert send it in turn."""
    sends, found = Counter[int](), list[NewExpert]()
    for node, (old, new) in enumerate(zip(before, after, strict=True)):
        for expert in sorted({*new}):
            slots = [slot for slot, one in enumerate(new) if one == expert != old[slot]]
            holders = [at for at, row in enumerate(before) if expert in row]
            if slots:
                source = node if node in holders else min(holders, key=sends.__getitem__)
                sends[source] += source != node
                found.append(NewExpert(expert, source, node, slots))
    return found


def feasible(experts: int, nodes: int, slots: int, least: int) -> int:
    """The largest number of replicas that all experts can have, but not more than `least`.

    Raises:
        ConfigurationError: there are fewer slots than experts.
    """
    if nodes * slots < experts:
        raise ConfigurationError(
            f'{nodes * slots} slots ({nodes} x {slots}) must be at least the {experts} experts of '
            f'a layer: raise expert_slots to {-(-experts // nodes)}, or use more ranks.'
        )
    return min(least, nodes, nodes * slots // experts)


def allocate(tokens: Sequence[float], slots: int, least: int) -> list[int]:
    """Replicas of each expert, at least `least` >= 1 each; their sum is `slots`.

    Experts take their shares of the slots that are left, those with the fewest tokens first; the
    last one takes the remainder. Slots must suffice for `least`.
    """
    replicas = [0] * len(tokens)
    free, load = slots, float(sum(tokens))
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    for after, expert in zip(reversed(range(len(order))), order, strict=True):
        share = free * tokens[expert] / load if load > 0 else free / (after + 1)
        replicas[expert] = min(max(int(share), least), free - after * least) if after else free
        free -= replicas[expert]
        load -= tokens[expert]
    return replicas


def maximum_rank_overlap(replicas: Sequence[int], nodes: int, slots: int) -> list[list[int]]:
    """Experts in the slots of each node, given the replicas of each expert."""
    order = sorted(range(len(replicas)), key=replicas.__getitem__)
    rows: list[list[int]] = [[] for _ in range(nodes)]
    first = 0
    for group in batched(order, slots):
        last = min(nodes, first + replicas[group[0]])
        for row in rows[first:last]:
            row.extend(group)
        first = last
    placed = Counter(expert for row in rows for expert in row)
    for expert in order:
        left = replicas[expert] - placed[expert]
        while left:
            free = [row for row in rows if len(row) < slots]
            free.sort(key=lambda row, expert=expert: (expert in row, len(row)))  # type: ignore[misc]
            for row in free[:left]:
                row.append(expert)
            left -= len(free[:left])
    return rows


def _spread_few(rows: list[list[int]], least: int) -> None:
    """Exchange experts between nodes where one is on fewer than `least`, if possible."""
    holders = Counter(expert for row in rows for expert in set(row))
    for expert in [expert for expert, nodes in holders.items() if nodes < least]:
        for row in [row for row in rows if row.count(expert) > 1]:
            for other in [other for other in rows if expert not in other]:
                given = next((one for one in other if one not in row), None)
                if row.count(expert) > 1 and given is not None:
                    row[row.index(expert)], other[other.index(given)] = given, expert


def _kept(rows: list[list[int]], before: Placement) -> list[list[int]]:
    """`rows` in the order, and with the order of slots, in which fewest experts are new.

    Greedy: rows and nodes with most experts in common first.
    """
    experts = 1 + max(max(row) for row in (*rows, *before))
    held, wanted = _held(before, experts), _held(rows, experts)
    common = held @ wanted.T
    free = np.full(len(rows), True)
    chosen: dict[int, int] = {}
    for size in range(int(common.max()), -1, -1):
        for node in range(len(before)):
            found = np.flatnonzero(free & (common[node] == size))
            if node not in chosen and found.size:
                chosen[node] = int(found[0])
                free[found[0]] = False
    return [_in_slots(rows[chosen[node]], row) for node, row in enumerate(before)]


def _held(placement: Placement, experts: int) -> np.ndarray:
    """1.0 where a node has an expert, [nodes, experts]."""
    held = np.zeros((len(placement), experts))
    for node, row in enumerate(placement):
        held[node, list(row)] = 1
    return held


def _in_slots(row: Sequence[int], before: Sequence[int]) -> list[int]:
    """`row` with the experts that were in a slot `before` in that slot."""
    new, slots = Counter(row), list[int | None]()
    for expert in before:
        stays = new[expert] > 0
        slots.append(expert if stays else None)
        new[expert] -= stays
    rest = (+new).elements()
    return [next(rest) if expert is None else expert for expert in slots]
