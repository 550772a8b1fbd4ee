# SPDX-License-Identifier: Apache-2.0
r"""Computes costs and benefits of fault-tolerance systems, by closed formulas and simulation.

    moevement simulate --system moevement --window 6 --iteration-time 2.9 --overhead 0.06 \
        --mtbf 600
    moevement simulate --system gemini --profile run.json --gpus 4096 \
        --gpu-hours-per-failure 30000
    moevement simulate sweep --over mtbf --values 300,600,1800,7200 --systems gemini,ours ...
    moevement simulate --system ours --profile runs/events --mtbf 0.5x
    moevement simulate iteration --profile train.log
    moevement simulate placement ranks --nodes 12 --gpus-per-node 8 --failed 4
    moevement simulate paper

ETTR is the share of wall-clock time in iterations that are kept. Semantics, formulas and systems:
docs/simulator.md. Each subcommand has its own --help.

Exit status: 0 done, 2 a flag or file breaks a rule, or a plan is infeasible.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from msgspec.structs import replace

from moevement_ext.plan.strategy.dense import daly_s, young_s

from ..lab.arguments import Parser
from ..model.command import show
from ..model.fields import FieldError
from . import closed_form, flags
from .closed_form import Dense
from .experts import PartialRun
from .runs import Run
from .systems import SYSTEMS, System

SUBCOMMANDS = {'sweep': 'sweep', 'iteration': 'iteration', 'paper': 'paper.__main__',
               'placement': 'placement'}  # fmt: skip


def answer(scenario: flags.Scenario, name: str) -> dict[str, object]:
    """Results for one system, by closed formula and by simulation; seconds, bytes, shares.

    Raises FieldError, InfeasiblePlan.
    """
    system = scenario.system(name)
    costs = system.costs
    found = scenario.simulate(system)
    dense = isinstance(costs, Dense)
    return {
        'system': name,
        'iteration_s': costs.iteration_s,
        'interval' if dense else 'window': costs.period,
        'overhead_s': costs.overhead_s,
        **({'stall_s': costs.stall_s} if isinstance(costs, Dense) else {}),
        'restart_s': costs.restart_s,
        'mtbf_s': costs.mtbf_s,
        **system.found,
        'ettr_first_order': costs.ettr_first_order(),
        'ettr_exact': costs.ettr_exact(),
        'ettr_simulated': found.ettr,
        'ettr_simulated_ci95': list(found.ci95),
        'expected_recovery_s': costs.expected_recovery_s(),
        'simulated_failures': found.failures,
        'simulated_hours': found.hours,
        'simulated_lost_s_per_failure': found.lost_s,
        'simulated_struck_again': found.struck_again,
        'simulated_wait_for_spare_s': found.waited_s,
        **lost_tokens(found.run),
    }


def lost_tokens(run: Run) -> dict[str, object]:
    """PLT, MLT and the final number of saved experts, for systems that lose tokens."""
    if not isinstance(run, PartialRun):
        return {}
    return {
        'lost_tokens_share': run.plt(),
        'lost_tokens_share_of_1_in_20': run.plt_of_unlucky(),
        'lost_tokens_per_failure_iterations': run.mlt(),
        'saved_experts_at_end': run.saved(),
    }


def optimal_interval(system: System) -> dict[str, object]:
    """Best intervals for the system's stall and overhead, in iterations and seconds.

    Raises FieldError for a system with windows.
    """
    costs = system.costs
    if not isinstance(costs, Dense):
        raise FieldError('optimal_interval', f'{system.name} has a window, not an interval')
    iterations = closed_form.optimal(costs)._asdict()
    rules = {'exact': closed_form.exact_s, 'young': young_s, 'daly': daly_s}
    seconds = {name: rule(costs.stall_s, costs.mtbf_s) for name, rule in rules.items()}
    return {
        **{f'optimal_interval_{name}': value for name, value in iterations.items()},
        **{f'optimal_interval_{name}_s': value for name, value in seconds.items()},
    }


def compute(args: argparse.Namespace) -> dict[str, object]:
    """Compute what the flags ask for. Raises the errors that `flags.errors` handles."""
    scenario = flags.scenario(args)
    if not args.optimal_interval:
        return answer(scenario, args.system)
    options = scenario.options
    if options.interval is None and scenario.profile is None and args.system != 'none':
        system = scenario._replace(options=replace(options, interval=1)).system(args.system)
        best: Any = optimal_interval(system)['optimal_interval_exact']
        if best == math.inf:
            raise FieldError('interval', 'is missing; without failures no interval is best')
        scenario = scenario._replace(options=replace(options, interval=int(best)))
    best_intervals = optimal_interval(scenario.system(args.system))
    return {**answer(scenario, args.system), **best_intervals}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in SUBCOMMANDS:
        module = import_module(f'.{SUBCOMMANDS[arguments[0]]}', __package__)
        return int(module.main(arguments[1:]))
    parser = Parser(prog='moevement simulate', description=__doc__)
    parser.add_argument('--system', choices=SYSTEMS, required=True)
    parser.add_argument(
        '--optimal-interval',
        action='store_true',
        help='print the best intervals too; --interval may be left out',
    )
    flags.add_scenario_flags(parser)
    args = parser.parse_args(arguments)
    with flags.errors(parser):
        found = compute(args)
    show(found, as_json=args.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
