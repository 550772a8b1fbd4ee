# SPDX-License-Identifier: Apache-2.0
"""Draws kind, victims and time of faults from a seed; no two faults of a job are equal."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..lab.job import Kind
from .configuration import FAULTS

_LATEST_ITERATIONS = 8
_AT_ONCE = 0.25
_APART_S = 2.5


class Fault(NamedTuple):
    """One fault."""

    kind: Kind
    victims: tuple[int, ...]
    """Ranks; all ranks of a node for `NODE`, the first of each for `AWAY` and `BACK`. A `DOUBLE`
    with `apart_s` may hit the replacement."""
    after: int
    """Iterations trained before the fault, since the last recovery."""
    phase: float
    """Additional wait, in iterations."""
    apart_s: float = 0.0
    """Seconds between the two kills of a `DOUBLE`, or from the fault of the coordinator to that of
    the worker, which comes first if this is negative."""

    def __str__(self) -> str:
        ranks = ', '.join(map(str, self.victims))
        apart = f' {self.apart_s:.1f} s apart' if self.apart_s else ''
        return f'{self.kind:6} rank{"s" if len(self.victims) > 1 else ""} {ranks}{apart}'


def draw_faults(
    seed: int,
    count: int,
    kinds: Sequence[Kind],
    nodes: int,
    workers_per_node: int,
    job: int = 0,
    most_away: int = 0,
) -> list[Fault]:
    """Draw the faults of one job, of whose nodes at most `most_away` are lost at any time.

    Kinds come from a shuffled deck, so that a few dozen faults have all of them. No two faults have
    the same kind, victims and number of iterations before them.
    """
    rng = random.Random(f'{seed} faults {job}')
    drawn: dict[object, Fault] = {}
    away: list[int] = []
    for kind, _ in zip(_kinds(rng, kinds), range(count), strict=False):
        if kind in (Kind.AWAY, Kind.BACK):
            fault = _move(rng, kind, nodes, workers_per_node, away, most_away)
        else:
            fault = _draw(rng, kind, nodes, workers_per_node)
        while fault[:3] in drawn:
            fault = fault._replace(after=fault.after + 1)
        drawn[fault[:3]] = fault
    return list(drawn.values())


def draw_window(seed: int, job: int, longest: int) -> int:
    """Draw the iterations per window, 1 to `longest`; consecutive jobs have different windows."""
    windows = list(range(1, longest + 1))
    random.Random(seed).shuffle(windows)
    return windows[job % longest]


def _kinds(rng: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    while True:
        deck = [kind for kind in kinds for _ in range(FAULTS[kind])]
        rng.shuffle(deck)
        yield from deck


def _move(
    rng: random.Random,
    kind: Kind,
    nodes: int,
    workers_per_node: int,
    away: list[int],
    most_away: int,
) -> Fault:
    """Add nodes to those that are away, or remove one; the other if `kind` is impossible."""
    if away and (kind is Kind.BACK or len(away) == most_away):
        kind, moved = Kind.BACK, [away.pop(rng.randrange(len(away)))]
    else:
        here = [node for node in range(nodes) if node not in away]
        kind, moved = Kind.AWAY, rng.sample(here, rng.randint(1, most_away - len(away)))
        away += moved
    victims = tuple(node * workers_per_node for node in moved)
    return Fault(kind, victims, _after(rng), rng.uniform(0.0, 2.0))


def _after(rng: random.Random) -> int:
    return 0 if rng.random() < _AT_ONCE else rng.randint(1, _LATEST_ITERATIONS)


def _draw(rng: random.Random, kind: Kind, nodes: int, workers_per_node: int) -> Fault:
    ranks = range(nodes * workers_per_node)
    after = _after(rng)
    apart_s = 0.0
    match kind:
        case Kind.NODE:
            first = rng.randrange(nodes) * workers_per_node
            victims = tuple(ranks[first : first + workers_per_node])
        case Kind.DOUBLE:
            apart_s = rng.choice((0.0, rng.uniform(0.1, _APART_S)))
            victims = tuple(rng.choices(ranks, k=2) if apart_s else rng.sample(ranks, 2))
        case Kind.COORDINATOR | Kind.STILL:
            apart_s = rng.choice((0.0, rng.uniform(-_APART_S, _APART_S)))
            victims = (rng.choice(ranks),)
        case Kind.WHOLE | Kind.JOB:
            victims = tuple(ranks)
        case Kind.AGENT:
            victims = (rng.choice(ranks[1:]),)  # rank 0 holds the store of the job
        case _:
            victims = (rng.choice(ranks),)
    return Fault(kind, victims, after, rng.uniform(0.0, 2.0), apart_s)
