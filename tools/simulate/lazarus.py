# SPDX-License-Identifier: Apache-2.0
r"""Goodput with nodes under repair and no spare, and what replicas of experts gain and cost.

    moevement simulate lazarus
    moevement simulate lazarus --model job.json --repair 7200 --restart 120

Answers to lost nodes side by side, for the presets of `moevement plan` or for one model as there;
then the busiest rank with and without replicas, and what moves when they follow the tokens.
Semantics: docs/simulator.md, "Nodes under repair".

Exit status: 0 done, 2 a flag or file breaks a rule.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from math import comb, exp
from statistics import mean
from typing import NamedTuple

import numpy as np
from rich.console import Console

from moevement_ext.plan.expert_placement import Placement, moves, place

from ..lab.programs import program
from ..lab.tables import table
from ..model.description import PRESETS, Training, known_or_read
from ..model.layout import Layout
from .experts import draw_shares
from .scenario import errors

_GPUS_OF_NODE = 8
_DOWN = 0.25, 1.0, 2.0
_ANSWERS = 'wait', 'guests', 'routes', 'unit-drop', 'layout', 'lazarus'
_GOODPUT = ('!model', '>!N', '>!down', *(f'>!{name}' for name in _ANSWERS))
_REPLICAS = '!model|>!experts|>!ranks|>!slots|>!skew|>!plain|>!slots|>!moved'.split('|')
_SKEWS = 0.01, 0.05, 0.2
_DRIFT = 0.5
_DRAWS = 10
_COPIES = 3


class Nodes(NamedTuple):
    """Nodes of a job, and the sets of its units that lose a node together."""

    nodes: int
    sets: int
    stages: int
    stage_ranks: int

    def speeds(self, lost: int) -> list[float]:
        """Speed with `lost` nodes, over that of all, in the order of _ANSWERS; layouts are free."""
        left, of_set = self.nodes - lost, self.nodes // self.sets
        guests = 1 / -(-self.nodes // left)
        whole = comb(self.nodes - of_set, lost) / comb(self.nodes, lost)
        columns = (self.stages * self.stage_ranks - _GPUS_OF_NODE * lost) // self.stages
        return [
            float(lost == 0),
            guests,
            whole + self._none_whole(lost) * guests,
            whole,
            left // of_set / self.sets,
            max(columns, 0) / self.stage_ranks,
        ]

    def _none_whole(self, lost: int) -> float:
        """Probability that no set has all its nodes, by inclusion and exclusion."""
        of_set = self.nodes // self.sets
        ways = (
            (-1) ** sets * comb(self.sets, sets) * comb(self.nodes - sets * of_set, lost)
            for sets in range(self.sets + 1)
        )
        return sum(ways) / comb(self.nodes, lost)

    def goodput(self, down: float, repair_s: float, restart_s: float) -> list[float]:
        """Mean speed if `down` nodes are under repair on average, by a Poisson distribution."""
        found, weight = np.zeros(len(_ANSWERS)), exp(-down)
        for lost in range(self.nodes):
            found += weight * np.array(self.speeds(lost))
            weight *= down / (lost + 1)
        # Another layout begins at each loss, and at each return.
        found[_ANSWERS.index('layout')] *= max(0.0, 1 - 2 * restart_s * down / repair_s)
        return list(found)


def nodes_of(layout: Layout) -> Nodes:
    lost = -(-min(_GPUS_OF_NODE, layout.stage_ranks) * layout.units // layout.stage_ranks)
    nodes = max(1, layout.ranks // _GPUS_OF_NODE)
    return Nodes(nodes, max(1, layout.units // lost), layout.pipeline, layout.stage_ranks)


def busiest(shares: Sequence[float], placement: Placement) -> float:
    """Tokens of the busiest rank over the mean, if replicas of an expert share its tokens."""
    replicas = Counter(expert for row in placement for expert in row)
    loads = [sum(shares[expert] / replicas[expert] for expert in row) for row in placement]
    return max(loads) / mean(loads)


def replicas(experts: int, ranks: int, slots: int, skew: float) -> list[float]:
    """Busiest rank of plain expert parallelism and with slots; part of the slots that move.

    Means over draws of popularities, each of which then drifts.
    """
    plain = np.arange(experts).reshape(ranks, -1).tolist()
    found = []
    for seed in range(_DRAWS):
        random = np.random.default_rng(seed)
        drawn = [random.permutation(draw_shares(skew, experts, 2 * seed + at)) for at in (0, 1)]
        shares, later = drawn[0].tolist(), ((1 - _DRIFT) * drawn[0] + _DRIFT * drawn[1]).tolist()
        before = place(shares, ranks, slots, 2)
        after = place(later, ranks, slots, 2, before)
        sent = sum(move.source != move.target for move in moves(before, after))
        found.append((busiest(shares, plain), busiest(shares, before), sent / (ranks * slots)))
    return [mean(column) for column in zip(*found, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = program('simulate lazarus', __doc__)
    args = parser.parse_args(argv)
    with errors(parser):
        one = args.model and {args.model: known_or_read(args.model, Training, PRESETS, '--model')}
    goodput, gains = [], []
    for name, training in (one or PRESETS).items():
        layout, experts = training.layout, training.model.experts
        nodes = nodes_of(layout)
        for down in _DOWN:
            speeds = nodes.goodput(down, args.repair, args.restart)
            goodput.append((name, str(nodes.nodes), f'{down:g}', *map('{:.3f}'.format, speeds)))
        for skew in _SKEWS if layout.expert > 1 else ():
            slots = _COPIES * experts // layout.expert
            counts = *map(str, (experts, layout.expert, slots)), f'{skew:g}'
            numbers = replicas(experts, layout.expert, slots, skew)
            gains.append((name, *counts, *map('{:.3f}'.format, numbers)))
    Console().print(table(_GOODPUT, goodput, box=None))
    Console().print(table(_REPLICAS, gains, box=None))
    return 0


if __name__ == '__main__':
    sys.exit(main())
