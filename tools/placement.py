# SPDX-License-Identifier: Apache-2.0
r"""Computes the probability that copies of ranks, or replicas of experts, survive failures.

    moevement placement ranks --nodes 12 --gpus-per-node 8 --failed 4
    moevement placement ranks --nodes 64 --gpus-per-node 8 --nodes-per-switch 8 --same-state 2
    moevement placement experts --nodes 10 --slots 6 --experts 16 --least 2 --skew 2 \
        --failed 4

`ranks` places 1, 2 and 3 copies of each rank's state on other nodes, as training does, and prints
the probability that all state survives a random set of failed nodes. `experts` compares Lazarus'
maximum rank overlap with evenly distributed replicas.

Exit status: 0 done, 2 the input is impossible.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .lab.arguments import Parser, at_least
from .lab.figures import print_json
from .lab.tables import table
from .simulate import placement as expert_placement
from .simulate.placement import Placed, survival_report

SPREADS = 20
_MOST_SKEW = 100


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        found = ranks_report(args) if args.command == 'ranks' else experts_report(args)
    except ValueError as error:
        print(f'placement: {error}', file=sys.stderr)
        return 2
    if args.json:
        print_json(found)
    elif args.command == 'ranks':
        Console().print(ranks_table(found['placements']))
    else:
        print_experts(found, Console())
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement placement', description=__doc__.split('\n')[0])
    positive = at_least(1)
    commands = parser.add_subparsers(dest='command', required=True)
    ranks = commands.add_parser('ranks', help="copies of ranks' states")
    experts = commands.add_parser('experts', help='replicas of experts')
    for command in (ranks, experts):
        command.add_argument('--nodes', type=positive, required=True)
        command.add_argument('--failed', type=positive, default=4, help='most failures at once')
        command.add_argument('--json', action='store_true')
    ranks.add_argument('--gpus-per-node', type=positive, default=8)
    ranks.add_argument('--nodes-per-switch', type=positive, help='links within a switch are cheap')
    ranks.add_argument(
        '--same-state', type=positive, default=1, help='data-parallel ranks with the same state'
    )
    experts.add_argument('--slots', type=positive, required=True, help='experts a node can hold')
    experts.add_argument('--experts', type=positive, required=True)
    experts.add_argument('--least', type=positive, default=2, help='replicas of each expert')
    experts.add_argument(
        '--skew', type=_power, default=1.0, help='tokens of the i-th expert grow as i to this power'
    )
    return parser.parse_args(argv)


def ranks_report(args: argparse.Namespace) -> dict[str, Any]:
    """Placements of 1 to 3 copies.

    Raises:
        ValueError: flags contradict each other.
    """
    ranks = args.nodes * args.gpus_per_node
    if ranks % args.same_state:
        raise ValueError(f'--same-state {args.same_state}: must divide the {ranks} ranks')
    if args.failed > args.nodes:
        raise ValueError(f'--failed {args.failed}: there are {args.nodes} nodes')
    domains = [f'node{rank // args.gpus_per_node:05}' for rank in range(ranks)]
    apart = ranks // args.same_state
    groups = [list(range(first, ranks, apart)) for first in range(apart)]

    def hops(owner: int, holder: int) -> float:
        switch = args.nodes_per_switch * args.gpus_per_node
        return float(owner // switch != holder // switch)

    placements = survival_report(
        domains,
        range(1, args.failed + 1),
        groups=groups if args.same_state > 1 else None,
        distance=hops if args.nodes_per_switch else None,
    )
    return {'nodes': args.nodes, 'ranks': ranks, 'placements': placements}


def experts_report(args: argparse.Namespace) -> dict[str, Any]:
    """Both placements for one distribution of tokens.

    Raises:
        ValueError: the experts do not fit.
    """
    if args.failed > args.nodes:
        raise ValueError(f'--failed {args.failed}: there are {args.nodes} nodes')
    tokens = [(expert + 1) ** args.skew for expert in range(args.experts)]
    shape = (args.nodes, args.slots)
    replicas = expert_placement.allocate_replicas(tokens, *shape, args.least)
    overlap = expert_placement.maximum_rank_overlap(replicas, *shape)
    spreads = [expert_placement.spread(replicas, *shape, seed) for seed in range(SPREADS)]
    recovery = expert_placement.recovery_probability
    return {
        'replicas': replicas,
        'representatives': expert_placement.representatives(replicas, args.slots),
        'representatives_fit': expert_placement.representatives_fit(replicas, *shape),
        'maximum_rank_overlap': [recovery(overlap, lost) for lost in range(1, args.failed + 1)],
        'spread': [
            statistics.mean(recovery(placement, lost) for placement in spreads)
            for lost in range(1, args.failed + 1)
        ],
        'nodes': [list(node) for node in overlap],
    }


def ranks_table(placements: Sequence[Placed]) -> Table:
    """A row for each number of replicas, a column for each number of failed nodes."""
    columns = ['>copies', '>holders', '>load', '>links between switches']
    columns += [f'>{lost.failed} failed' for lost in placements[0].survival]
    rows = []
    for placed in placements:
        least, most = placed.load
        away = placed.mean_distance
        rows.append((
            str(placed.replicas),
            str(placed.holders),
            str(least) if least == most else f'{least} to {most}',
            '' if away is None else f'{away:.0%}',
            *(
                f'{one.probability:.4f}'
                + (f' ±{one.standard_error:.4f}' if one.standard_error else '')
                for one in placed.survival
            ),
        ))  # fmt: skip
    return table(columns, rows, title='Probability that nothing is lost', title_justify='left')


def print_experts(found: dict[str, Any], console: Console) -> None:
    """Replicas, and a row per number of failed nodes."""
    console.print(f"replicas: {' '.join(map(str, found['replicas']))}", highlight=False)
    fit = 'fit, so the overlap is optimal' if found['representatives_fit'] else 'do not all fit'
    console.print(f"representatives: {found['representatives']}; they {fit}", highlight=False)
    pairs = zip(found['maximum_rank_overlap'], found['spread'], strict=True)
    rows = [
        (str(lost), f'{overlap:.3f}', f'{spread:.3f}')
        for lost, (overlap, spread) in enumerate(pairs, start=1)
    ]
    columns = ('>failed', '>maximum rank overlap', '>spread (mean)')
    title = 'Probability that every expert survives'
    console.print(table(columns, rows, title=title, title_justify='left'))


def _power(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= _MOST_SKEW:
        rule = f'give a number from -{_MOST_SKEW} to {_MOST_SKEW}'
        raise argparse.ArgumentTypeError(f'{text}: {rule}')
    return value


if __name__ == '__main__':
    sys.exit(main())
