# SPDX-License-Identifier: Apache-2.0
r"""Several systems over a range of one flag: a table, JSON and a plot.

    moevement simulate sweep --over mtbf --values 300,600,1800,7200 --systems gemini,ours \
        --profile docs/assets/simulate-profile.json --plot ettr.png
    moevement simulate sweep --over gpus --values 512,4096,16384 \
        --gpu-hours-per-failure 30000 ...
    moevement simulate sweep --over network-bandwidth --values 0.5,1,2,5 --show window ...
    moevement simulate sweep --over interval --values 1,10,100 --systems gemini \
        --show overhead ...

Lines are closed formulas, points with bars are the simulation with its 95 % confidence interval. A
system that is infeasible at some value is left out there, and the reason is printed; so is a flag
that changes nothing.
"""

import argparse
import math
import sys
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from moevement_ext.plan.byte_planner import InfeasiblePlan

from ..lab.drawing import OWN, PALETTE, picture, subtitle
from ..lab.figures import print_json
from ..lab.programs import program
from ..lab.tables import say, table, tick
from . import scenario
from .systems import SYSTEMS

WHOLE = ('gpus', 'window', 'interval')
_WORDS = tomllib.loads(files(__package__).joinpath('sweep.toml').read_text('utf-8'))
SHOWN: dict[str, str] = _WORDS['shown']
AXIS: dict[str, str] = _WORDS['axis']
NAMES: dict[str, str] = _WORDS['names']
# Lines of this project stand out.
_OWN: dict[str, dict[str, Any]] = {
    'ours': {'color': OWN, 'linewidth': 2.6, 'zorder': 3},
    'copy': {'color': OWN, 'linewidth': 1.6, 'linestyle': '--'},
}
# Share of an axis that a label takes.
_CROWDED = 0.06


type Point = dict[str, Any]
"""`value` of the varied flag, and the answer for one system."""


def sweep(args: argparse.Namespace, values: Sequence[float]) -> tuple[list[Point], list[str]]:
    """Points, and reasons for missing ones. Raises FieldError and errors of file readers."""
    points: list[Point] = []
    missing, different = [], []
    for value in tqdm(values, desc=args.over, disable=None, leave=False):
        given = (value, False) if args.over == 'mtbf' else value
        setattr(args, args.over.replace('-', '_'), given)
        varied = scenario.scenario(args)
        for name in args.systems:
            try:
                answer = scenario.answer(varied, name)
            except InfeasiblePlan as error:
                missing.append(f'{name} at {args.over} {value:g}: {error}')
                continue
            points.append({'value': value, **answer})
            if answer not in different:
                different.append(answer)
    if len(values) > 1 and not missing and len(different) <= len(args.systems):
        missing.append(f'--over {args.over} changes nothing for {", ".join(args.systems)}')
    return points, missing


def shown(point: Point, what: str) -> float:
    field = {'ettr': 'ettr_exact', 'simulated': 'ettr_simulated', 'recovery': 'expected_recovery_s'}
    if what == 'window' and 'interval' in point:
        return float(point['interval'])
    return float(point[field.get(what, what)])


def print_table(points: Sequence[Point], over: str, what: str) -> None:
    systems = [*dict.fromkeys(point['system'] for point in points)]
    rows: dict[float, dict[str, str]] = {}
    for point in points:
        rows.setdefault(point['value'], {})[point['system']] = f'{shown(point, what):.4g}'
    cells = ([f'{one:g}', *(row.get(name, '-') for name in systems)] for one, row in rows.items())
    columns = [f'>{name}' for name in (AXIS[over], *systems)]
    Console().print(table(columns, cells, title=SHOWN[what]))


def draw(points: Sequence[Point], over: str, what: str, target: Path) -> None:
    varied = AXIS[over].removesuffix(' (s)') if over == 'mtbf' else AXIS[over]
    others = iter(PALETTE * len(SYSTEMS))
    with picture(target, figsize=(8, 4.5)) as axes:
        axes.set_title(f'{SHOWN[what]} by {varied}', loc='left')
        for name in dict.fromkeys(point['system'] for point in points):
            style = _OWN.get(name) or {'color': next(others), 'linewidth': 1.6}
            own = [point for point in points if point['system'] == name]
            places = [point['value'] for point in own]
            axes.plot(places, [shown(point, what) for point in own], label=NAMES[name], **style)
            if what == 'ettr':
                middle = np.array([point['ettr_simulated'] for point in own])
                low, high = np.array([point['ettr_simulated_ci95'] for point in own]).T
                ends, color = [middle - low, high - middle], style['color']
                axes.errorbar(places, middle, ends, fmt='o', markersize=4, color=color)
        if what == 'ettr':
            subtitle(axes, 'lines: closed form; points: simulated, with 95 % confidence')
        _ticks(axes, sorted({point['value'] for point in points}), over)
        axes.set_xlabel(varied)
        axes.set_ylabel(SHOWN[what])
        axes.legend(loc='best')


def _ticks(axes: Any, values: Sequence[float], over: str) -> None:
    logarithmic = over != 'skew' and values[0] > 0
    place = math.log if logarithmic else float
    axes.set_xscale('log' if logarithmic else 'linear')
    length = place(values[-1]) - place(values[0])
    labelled: list[float] = []
    for value in values:
        if not labelled or place(value) - place(labelled[-1]) > _CROWDED * length:
            labelled.append(value)
    axes.set_xticks(labelled, [tick(one) if over == 'mtbf' else f'{one:,g}' for one in labelled])
    axes.set_xticks([], minor=True)


def parse_arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[float]]:
    parser = program('simulate sweep', __doc__)
    scenario.add_scenario_flags(parser)
    args = parser.parse_args(argv)
    args.systems = args.systems.split(',')
    if unknown := [name for name in args.systems if name not in SYSTEMS]:
        parser.error(f'--systems: {unknown[0]!r} is none of {", ".join(SYSTEMS)}')
    try:
        kind = int if args.over in WHOLE else float
        return parser, args, [kind(text) for text in args.values.split(',')]
    except ValueError:
        parser.error(f'--values {args.values}: give values of --{args.over}, separated by commas')


def main(argv: Sequence[str] | None = None) -> int:
    parser, args, values = parse_arguments(argv)
    with scenario.errors(parser):
        points, missing = sweep(args, values)
    console = Console(stderr=args.json)
    for reason in missing:
        say(console, reason)
    if not points:
        return 2
    if args.json:
        print_json(points)
    else:
        print_table(points, args.over, args.show)
    if args.plot:
        try:
            draw(points, args.over, args.show, args.plot)
        except (OSError, ValueError) as error:
            parser.error(f'--plot {args.plot}: {getattr(error, "strerror", None) or error}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
