# SPDX-License-Identifier: Apache-2.0
r"""Computes costs and benefits of fault-tolerance systems, by closed formulas and simulation.

    moevement simulate --system moevement --window 6 --iteration-time 2.9 --overhead 0.06 \
        --mtbf 600
    moevement simulate --system gemini --profile run.json --gpus 4096 \
        --gpu-hours-per-failure 30000
    moevement simulate sweep --over mtbf --values 300,600,1800,7200 --systems gemini,ours ...
    moevement simulate --system ours --profile runs/events --mtbf 0.5x
    moevement simulate paper
    moevement simulate reroute
    moevement simulate lazarus

ETTR is the share of wall-clock time in iterations that are kept. Semantics, formulas and systems:
docs/simulator.md. Each subcommand has its own --help.

Exit status: 0 done, 2 a flag or file breaks a rule, or a plan is infeasible.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from importlib import import_module

from msgspec.structs import replace

from ..lab.fields import FieldError
from ..lab.programs import Parser
from ..lab.tables import show
from . import scenario
from .closed_form import Dense, optimal
from .systems import SYSTEMS

SUBCOMMANDS = ('sweep', 'paper', 'reroute', 'lazarus')


def compute(args: argparse.Namespace) -> dict[str, object]:
    """Compute what the flags ask for. Raises the errors that `scenario.errors` handles."""
    found, name = scenario.scenario(args), args.system
    if not args.optimal_interval:
        return scenario.answer(found, name)
    searched = args.interval is None and found.profile is None and name != 'none'
    options = replace(found.options, interval=1) if searched else found.options
    costs = found._replace(options=options).system(name).costs
    if not isinstance(costs, Dense):
        raise FieldError('optimal_interval', f'{name} has a window, not an interval')
    best = optimal(costs)
    if searched:
        if math.isinf(best['exact']):
            raise FieldError('interval', 'is missing; without failures no interval is best')
        found = found._replace(options=replace(options, interval=int(best['exact'])))
    intervals = {f'optimal_interval_{rule}': value for rule, value in best.items()}
    return {**scenario.answer(found, name), **intervals}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in SUBCOMMANDS:
        return int(import_module(f'.{arguments[0]}', __package__).main(arguments[1:]))
    parser = Parser(prog='moevement simulate', description=__doc__)
    parser.add_argument('--system', choices=SYSTEMS, required=True)
    parser.add_argument(
        '--optimal-interval',
        action='store_true',
        help='print the best intervals too; --interval may be left out',
    )
    scenario.add_scenario_flags(parser)
    args = parser.parse_args(arguments)
    with scenario.errors(parser):
        found = compute(args)
    show(found, as_json=args.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
