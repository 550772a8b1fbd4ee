# SPDX-License-Identifier: Apache-2.0
"""Compares fault-tolerance methods under one trace of failures, in one table.

    moevement compare --quick
    moevement compare --json compare.json --plot pictures
    moevement compare --rows torch-dist-sync,global,localized --faults 4
    moevement compare --rows windows,windows-frozen,global,localized    # part by part
    moevement compare peers    # other projects; its own --help

A small GPT on 4 emulated nodes trains to its end once per row. In every row the same ranks are
killed, or lose their node with its memory, at the same times after the warm-up, which is long
enough for a complete checkpoint. Plain Megatron without failures runs first in every round; ratios
are taken within a round. Rates of copies to host memory and of replication are limited, since a toy
model would hide all of them: a capture of the whole state takes --dense-copy iterations.

With --quick workers are forks of one process that has imported the program, like hot spares;
otherwise they are new processes, whose start takes most of a recovery on a CPU. `start` is that
time; `warm` is ETTR without it. PLT: share of all tokens whose updates were lost.

Exit status: 0 done, 1 a row that promises equal bits ended with other bits, 2 no result.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from ..lab.arguments import Parser, above_0, at_least
from ..lab.benchmark import add_output_flags, exit_on_sigterm, prepare, run_benchmark
from ..lab.errors import LabError
from ..lab.hardware import Hardware
from . import measuring
from .report import (
    PICTURE,
    Comparison,
    Conditions,
    RowResult,
    draw,
    figures,
    markdown,
    over_rounds,
    print_report,
)
from .rows import ROWS, chosen
from .running import RANKS, STATE_BYTES, Course, Lived, PlannedFault, draw_faults

_PROG = 'moevement compare'
# Faults are drawn between these parts of plain Megatron's duration after the warm-up.
_FIRST, _LAST = 0.2, 0.8
_LEAST_NETWORK_GB_PER_S = 0.02
# Number of intervals after which each row has a complete checkpoint.
_INTERVALS_OF_WARM_UP = 2
# Help and defaults by flag: with --quick, and without.
_SIZES = {
    'rounds': ('rounds over all rows', 1, 2),
    'iterations': ('iterations of each job', 32, 120),
    'faults': ('in each job', 2, 4),
    'interval': ('iterations between dense checkpoints', 4, 6),
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=_PROG, description=__doc__)
    add = parser.add_argument
    add('--quick', action='store_true', help='minutes: a shorter job, fewer faults, forked workers')
    add('--rows', default='all', help=f'some of {",".join(ROWS)} (default: all but windows and '
        'windows-frozen)')  # fmt: skip
    for name, (what, quick, full) in _SIZES.items():
        what = f'{what} (default: {full}; {quick} with --quick)'
        add(f'--{name}', type=at_least(1), help=what)
    add('--window', default='auto', help='iterations of a window, or auto (default: auto)')
    add('--dense-copy', type=above_0, default=2.0, metavar='N', help='a copy of the whole state '
        'takes as long as N iterations (default: 2)')  # fmt: skip
    add('--seed', type=int, default=1, help='seed of the trace (default: 1)')
    add_output_flags(parser, 'runs/compare')
    add('--plot', type=Path, metavar='DIR', help=f'write {PICTURE} here')
    add('--table', type=Path, metavar='FILE', help='write the table here, for a document')
    args = parser.parse_args(argv)
    for name, (_, quick, full) in _SIZES.items():
        setattr(args, name, getattr(args, name) or (quick if args.quick else full))
    if args.iterations < (least := 4 * _INTERVALS_OF_WARM_UP * args.interval):
        parser.error(f'--iterations {args.iterations}: must be at least {least}, 8 x --interval')
    try:
        args.rows = chosen(args.rows, args.quick)
    except ValueError as error:
        parser.error(str(error))
    return args


def measure(args: argparse.Namespace, console: Console) -> Comparison:
    """Run all rounds. Raises LabError: plain Megatron failed, or all rows did."""
    hardware = Hardware.here(gpu=False)
    output, data = prepare(args, 'jobs')
    course = Course(
        data=data, output=output,
        iterations=args.iterations, warm_up=_INTERVALS_OF_WARM_UP * args.interval,
        evaluate=_between_evaluations(args.iterations, args.interval),
        interval=args.interval, window=args.window,
        copy_gb_per_s=0.0, network_gb_per_s=0.0, mtbf_s=0.0, fork=args.quick,
    )  # fmt: skip
    faults: list[PlannedFault] = []
    found: dict[str, list[RowResult]] = {name: [] for name in args.rows}
    failed: dict[str, str] = {}
    paces: list[float] = []
    loads: list[float] = []
    for number in range(1, args.rounds + 1):
        loads.append(round(os.getloadavg()[0], 1))
        beside = {False: course.plain(number, copies=False)}
        paces.append(measuring.pace_s(beside[False].trained.log))
        if number == 1:
            faults = _drawn(args, beside[False])
            course = _limited(course, args, beside[False])
        for name, row in args.rows.items():
            try:
                if row.copies not in beside:
                    beside[row.copies] = course.plain(number, row.copies)
                hurt = course.hurt(number, name, row, faults)
                one = figures(row, hurt, beside[row.copies], course)
            except LabError as error:
                failed.setdefault(name, str(error))
                line = str(error)
            else:
                found[name].append(one)
                line = f'ETTR {one.ettr.median:.3f}, recovery {one.recovery_s.median:5.1f} s'
            console.print(f'{number}: {row.title}: {line}', highlight=False, markup=False)
    if not any(found.values()):
        raise LabError('no row ran; see the messages above')
    return Comparison(
        Conditions(hardware, loads, args.iterations, paces, course.copy_gb_per_s,
                   course.network_gb_per_s, args.quick, course.warm_up, faults),
        {name: over_rounds(runs) for name, runs in found.items() if runs},
        failed,
    )  # fmt: skip


def _between_evaluations(iterations: int, interval: int) -> int:
    """At most twelve evaluations, most of them in iterations without a dense checkpoint."""
    return next(n for n in itertools.count(iterations // 12 + 1) if math.gcd(n, interval) == 1)


def _drawn(args: argparse.Namespace, plain: Lived) -> list[PlannedFault]:
    span_s = measuring.span_s(plain.trained.log)
    return draw_faults(args.seed, args.faults, _FIRST * span_s, _LAST * span_s, RANKS)


def _limited(course: Course, args: argparse.Namespace, plain: Lived) -> Course:
    """Add the rate of faults, and limits of rates, derived from the pace of plain Megatron."""
    log = plain.trained.log
    copy = STATE_BYTES / (args.dense_copy * measuring.pace_s(log)) / 1e9
    return course._replace(
        copy_gb_per_s=copy,
        network_gb_per_s=max(2 * copy, _LEAST_NETWORK_GB_PER_S),
        mtbf_s=measuring.span_s(log) / args.faults,
    )


def show(args: argparse.Namespace, report: Comparison, console: Console) -> None:
    """Print the report, and write the requested files."""
    print_report(report, console)
    if args.plot:
        draw(report, args.plot / PICTURE)
    if args.table:
        args.table.write_text(markdown(report), 'utf-8')


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ['peers']:
        from . import peers

        return peers.main(given[1:])
    args = parse_arguments(given)
    return run_benchmark('compare', args, measure, partial(show, args))


if __name__ == '__main__':
    sys.exit(main())
