# SPDX-License-Identifier: Apache-2.0
r"""Goodput over the time of a job, with its failures marked: a trace, or failures drawn at random.

    python -m tools.simulate timeline --trace docs/assets/simulate-trace.csv \
        --systems gemini,ours --profile docs/assets/simulate-profile.json --plot goodput.png
    python -m tools.simulate timeline --mtbf 900 --job-hours 6 --systems gemini,ours ...

Goodput is the share of each span of time that went into iterations which were kept in the end. All
systems meet the same failures.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moevement_ext.plan.byte_planner import InfeasiblePlan
from tools.lab.arguments import Parser
from tools.simulate import flags
from tools.simulate.failures import Renewal
from tools.simulate.fields import FieldError
from tools.simulate.monte_carlo import Timeline
from tools.simulate.pictures import draw_timeline
from tools.simulate.profile import ProfileError
from tools.simulate.sweep import names_of
from tools.simulate.trace import TraceError

_HISTORIES = 2  # only the first is drawn


def timelines(args: argparse.Namespace, systems: Sequence[str]) -> dict[str, Timeline]:
    """Timeline by name of the system.

    Raises:
        FieldError: a flag has no sensible value, or is missing.
        ProfileError: the profile cannot be used.
        TraceError: the trace of failures cannot be used.
        InfeasiblePlan: a system cannot protect the job.
    """
    scenario = flags.scenario(args)
    if isinstance(scenario.process, Renewal) and args.job_hours is None:
        raise FieldError('job_hours', 'is missing; give it, or a trace')
    found = {}
    for name in systems:
        estimate, _ = scenario.simulate(scenario.system(name), whole_jobs=True)
        found[name] = estimate.timeline
    return found


def parse_arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser and the flags; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.simulate timeline',
        description=__doc__,
    )
    parser.add_argument('--systems', required=True, help='comma-separated')
    parser.add_argument('--bins', type=int, default=72, help='spans of time (default: 72)')
    parser.add_argument('--plot', type=Path, metavar='FILE', help='image to write')
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
    flags.add_flags(parser)
    parser.set_defaults(histories=_HISTORIES)
    args = parser.parse_args(argv)
    if args.bins < 1:
        parser.error(f'--bins {args.bins}: must be at least 1')
    return parser, args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser, args = parse_arguments(argv)
    try:
        found = timelines(args, names_of(parser, args.systems))
    except FieldError as error:
        parser.error(flags.flag_error(error))
    except (InfeasiblePlan, ProfileError, TraceError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps({name: _plain(timeline, args.bins) for name, timeline in found.items()}))
    else:
        _print_table(found)
    if args.plot:
        with flags.plot_errors(parser, args.plot):
            draw_timeline(found, args.bins, args.plot)
    return 0


def _plain(timeline: Timeline, bins: int) -> dict[str, list[float]]:
    middles, goodput = timeline.goodput(bins)
    return {
        'seconds': middles.tolist(),
        'goodput': goodput.tolist(),
        'failures': timeline.failures.tolist(),
    }


def _print_table(found: dict[str, Timeline]) -> None:
    table = Table()
    for column in ('system', 'hours', 'failures', 'goodput'):
        table.add_column(column, justify='left' if column == 'system' else 'right')
    for name, timeline in found.items():
        wall_s = timeline.seconds[-1]
        share = f'{timeline.useful_s[-1] / wall_s:.4f}'
        table.add_row(name, f'{wall_s / 3600:.2f}', str(len(timeline.failures)), share)
    Console().print(table)


if __name__ == '__main__':
    sys.exit(main())
