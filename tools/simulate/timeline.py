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
from pathlib import Path

import numpy as np
from rich.console import Console

from tools.lab.arguments import Parser
from tools.lab.drawing import FAILURE, picture, subtitle
from tools.lab.figures import print_json
from tools.lab.tables import table
from tools.lab.text import tick
from tools.simulate import flags
from tools.simulate.failures import Renewal
from tools.simulate.fields import FieldError
from tools.simulate.monte_carlo import Timeline
from tools.simulate.sweep import NAMES, add_output_flags, names_of, styles

_HISTORIES = 2  # only the first one is drawn


def timelines(args: argparse.Namespace, systems: Sequence[str]) -> dict[str, Timeline]:
    """Timeline by name of the system. Raises the errors that `flags.errors` handles."""
    scenario = flags.scenario(args)
    if isinstance(scenario.process, Renewal) and args.job_hours is None:
        raise FieldError('job_hours', 'is missing; give it, or a trace')
    return {
        name: scenario.simulate(scenario.system(name), whole_jobs=True).timeline for name in systems
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='python -m tools.simulate timeline', description=__doc__)
    parser.add_argument('--systems', required=True, help='comma-separated')
    parser.add_argument('--bins', type=int, default=72, help='spans of time (default: 72)')
    add_output_flags(parser)
    parser.set_defaults(histories=_HISTORIES)
    args = parser.parse_args(argv)
    parser.require_at_least_1(args, 'bins')
    with flags.errors(parser):
        found = timelines(args, names_of(parser, args.systems))
    if args.json:
        plain = {name: _plain(timeline, args.bins) for name, timeline in found.items()}
        print_json(plain, indent=0)
    else:
        _print_table(found)
    if args.plot:
        with flags.plot_errors(parser, args.plot):
            draw(found, args.bins, args.plot)
    return 0


def draw(timelines: dict[str, Timeline], bins: int, target: Path) -> None:
    """Draw the goodput of each system, and a mark per failure, into an image file."""
    with picture(target, figsize=(9, 4)) as axes:
        axes.set_title('Goodput over the time of the job', loc='left')
        first = next(iter(timelines.values()))
        span = tick(float(first.seconds[-1]) / bins)
        subtitle(axes, f'share of each {span} that went into iterations which were kept')
        least = 1.0
        for (name, one), style in zip(timelines.items(), styles(list(timelines)), strict=True):
            middles, goodput = one.goodput(bins)
            axes.step(middles, goodput, where='mid', label=NAMES[name], **style)
            least = min(least, float(np.min(goodput)))
        axes.plot(
            first.failures, np.full(len(first.failures), 0.97), '|', color=FAILURE, markersize=9,
            label='failure', transform=axes.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
        length = max(float(one.seconds[-1]) for one in timelines.values())
        axes.set_xlim(0, length)
        times = _round_times(length)
        axes.set_xticks(times, [tick(time) for time in times])
        axes.set_ylim(max(least - (1 - least) / 10, 0), 1 + (1 - least) / 12)
        axes.set_xlabel('since the job began')
        axes.set_ylabel('goodput')
        axes.legend(loc='upper left', bbox_to_anchor=(0, -0.16), ncols=4)


def _round_times(length: float) -> list[float]:
    """About six times from 0 to `length`, at full minutes, hours or days if it is long."""
    steps = [unit * many for unit in (1, 60, 3600, 86400) for many in (1, 2, 5, 10, 20, 30)]
    step = next((step for step in steps if length / step <= 8), length / 6)
    return [step * number for number in range(int(length / step) + 1)]


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
