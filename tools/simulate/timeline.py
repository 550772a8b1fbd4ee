# SPDX-License-Identifier: Apache-2.0
r"""Plots goodput over the time of a job, with its failures from a trace or at random times.

    python -m tools.simulate timeline --trace docs/assets/simulate-trace.csv \
        --systems gemini,ours --profile docs/assets/simulate-profile.json --plot goodput.png
    python -m tools.simulate timeline --mtbf 900 --job-hours 6 --systems gemini,ours ...

Goodput is the share of each time span in iterations that were kept. All systems get the same
failures.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from tools.lab.arguments import Parser
from tools.lab.figures import print_json
from tools.lab.tables import table
from tools.simulate import flags
from tools.simulate.failures import Renewal
from tools.simulate.fields import FieldError
from tools.simulate.monte_carlo import Timeline
from tools.simulate.pictures import draw_timeline
from tools.simulate.sweep import add_output_flags, names_of

_HISTORIES = 2  # only the first one is drawn


def timelines(args: argparse.Namespace, systems: Sequence[str]) -> dict[str, Timeline]:
    """Timeline by name of the system. Raises the errors that `flags.errors` handles."""
    scenario = flags.scenario(args)
    if isinstance(scenario.process, Renewal) and args.job_hours is None:
        raise FieldError('job_hours', 'is missing; give it, or a trace')
    return {
        name: scenario.simulate(scenario.system(name), whole_jobs=True).timeline for name in systems
    }


def parse_arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = Parser(prog='python -m tools.simulate timeline', description=__doc__)
    parser.add_argument('--systems', required=True, help='comma-separated')
    parser.add_argument('--bins', type=int, default=72, help='spans of time (default: 72)')
    add_output_flags(parser)
    parser.set_defaults(histories=_HISTORIES)
    args = parser.parse_args(argv)
    parser.require_at_least_1(args, 'bins')
    return parser, args


def main(argv: Sequence[str] | None = None) -> int:
    parser, args = parse_arguments(argv)
    with flags.errors(parser):
        found = timelines(args, names_of(parser, args.systems))
    if args.json:
        plain = {name: _plain(timeline, args.bins) for name, timeline in found.items()}
        print_json(plain, indent=0)
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
    rows = [
        (
            name,
            f'{one.seconds[-1] / 3600:.2f}',
            str(len(one.failures)),
            f'{one.useful_s[-1] / one.seconds[-1]:.4f}',
        )
        for name, one in found.items()
    ]
    Console().print(table(('system', '>hours', '>failures', '>goodput'), rows))


if __name__ == '__main__':
    sys.exit(main())
