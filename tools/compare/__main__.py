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
are taken within a round. The simulator predicts ETTR from the profile of the same job. Rates of
copies to host memory and of replication are limited, since a toy model would hide all of them: a
capture of the whole state takes --dense-copy iterations.

With --quick all workers are forks of one process that has imported the program, like hot spares;
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

from ..lab.arguments import Parser
from ..lab.benchmark import (
    add_output_flags,
    exit_on_sigterm,
    prepare,
    run_benchmark,
    write_table,
)
from ..lab.errors import LabError
from ..lab.hardware import Hardware
from . import measuring
from .report import (
    Comparison,
    Conditions,
    RowResult,
    figures,
    markdown,
    over_rounds,
    print_report,
)
from .rows import ROWS, chosen
from .running import (
    RANKS,
    STATE_BYTES,
    Course,
    Lived,
    PlannedFault,
    draw_faults,
)

_PROG = 'moevement compare'
# Faults are drawn between these parts of plain Megatron's duration after the warm-up.
_FIRST, _LAST = 0.2, 0.8
_LEAST_NETWORK_GB_PER_S = 0.02
# Number of intervals after which each row has a complete checkpoint.
_INTERVALS_OF_WARM_UP = 2
# Defaults by flag: with --quick, and without.
_SIZES = {'iterations': (32, 120), 'interval': (4, 6), 'faults': (2, 4), 'rounds': (1, 2)}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=_PROG, description=__doc__)
    add = parser.add_argument
    add('--quick', action='store_true', help='minutes: a shorter job, fewer faults, forked workers')
    add(
        '--rows',
        default='all',
        help=f'some of {",".join(ROWS)} (default: all but windows and windows-frozen)',
    )
    for name, what in (('rounds', 'rounds over all rows'), ('iterations', 'iterations of each job'),
                       ('faults', 'in each job'),
                       ('interval', 'iterations between dense checkpoints')):  # fmt: skip
        quick, full = _SIZES[name]
        add(f'--{name}', type=int, help=f'{what} (default: {full}; {quick} with --quick)')
    add('--window', default='auto', help='iterations of a window, or auto (default: auto)')
    add('--dense-copy', type=float, default=2.0, metavar='N', help='a copy of the whole state '
        'takes as long as N iterations (default: 2)')  # fmt: skip
    add('--seed', type=int, default=1, help='seed of the trace (default: 1)')
    add_output_flags(parser, 'runs/compare')
    add('--plot', type=Path, metavar='DIR', help='write pictures here')
    add('--table', type=Path, metavar='FILE', help='write the table here, for a document')
    args = parser.parse_args(argv)
    for name, sizes in _SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, sizes[not args.quick])
    parser.require_at_least_1(args, 'rounds', 'faults', 'interval')
    if args.iterations < 4 * _INTERVALS_OF_WARM_UP * args.interval:
        least = 4 * _INTERVALS_OF_WARM_UP * args.interval
        parser.error(f'--iterations {args.iterations}: must be at least {least}, 8 x --interval')
    if not args.dense_copy > 0:
        parser.error(f'--dense-copy {args.dense_copy:g}: must be above 0')
    if args.window != 'auto' and not (args.window.isdecimal() and int(args.window)):
        parser.error(f'--window {args.window}: must be a whole number above 0, or auto')
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
    faults: list[PlannedFault] | None = None
    found: dict[str, list[RowResult]] = {name: [] for name in args.rows}
    failed: dict[str, str] = {}
    paces: list[float] = []
    loads: list[float] = []
    for number in range(1, args.rounds + 1):
        loads.append(round(os.getloadavg()[0], 1))
        plain = course.plain(number, copies=False)
        beside = {False: plain}
        paces.append(measuring.pace_s(plain.trained.log))
        if number == 1:
            faults = faults or _drawn(args, plain)
            span_s = measuring.span_s(plain.trained.log)
            course = course._replace(mtbf_s=span_s / args.faults)
            course = _limited(course, args.dense_copy, paces[0])
        assert faults is not None
        for name, row in args.rows.items():
            try:
                if row.copies not in beside:
                    beside[row.copies] = course.plain(number, row.copies)
                hurt = course.hurt(number, name, row, faults)
                one = figures(row, hurt, beside[row.copies], course)
            except LabError as error:
                failed.setdefault(name, str(error))
                console.print(f'{number}: {row.title}: {error}', highlight=False, markup=False)
                continue
            found[name].append(one)
            console.print(
                f'{number}: ETTR {one.ettr.median:.3f}, recovery {one.recovery_s.median:5.1f} s  '
                f'{row.title}', highlight=False, markup=False,
            )  # fmt: skip
    if not any(found.values()):
        raise LabError('no row ran; see the messages above')
    assert faults is not None
    return Comparison(
        Conditions(hardware, loads, args.iterations, paces, course.copy_gb_per_s,
                   course.network_gb_per_s, args.quick, course.warm_up, faults),
        measuring.curves(plain),
        {name: over_rounds(runs) for name, runs in found.items() if runs},
        failed,
        [row.title for row in args.rows.values() if row.copies],
    )  # fmt: skip


def _between_evaluations(iterations: int, interval: int) -> int:
    """At most twelve evaluations, most of them in iterations without a dense checkpoint."""
    return next(n for n in itertools.count(iterations // 12 + 1) if math.gcd(n, interval) == 1)


def _drawn(args: argparse.Namespace, plain: Lived) -> list[PlannedFault]:
    span_s = measuring.span_s(plain.trained.log)
    return draw_faults(args.seed, args.faults, _FIRST * span_s, _LAST * span_s, RANKS)


def _limited(course: Course, dense_copy: float, iteration_s: float) -> Course:
    """Add rate limits, derived from the pace of plain Megatron."""
    copy = STATE_BYTES / (dense_copy * iteration_s) / 1e9
    return course._replace(
        copy_gb_per_s=copy, network_gb_per_s=max(2 * copy, _LEAST_NETWORK_GB_PER_S)
    )


def show(args: argparse.Namespace, report: Comparison, console: Console) -> None:
    """Print the report, and write the requested files.

    Raises LabError: a file cannot be written.
    """
    print_report(report, console)
    try:
        if args.plot:
            from .pictures import draw_all  # matplotlib takes a second

            for path in draw_all(report, args.plot):
                console.print(str(path), highlight=False, soft_wrap=True)
    except OSError as error:
        raise LabError(f'{error.filename}: {error.strerror}') from error
    write_table(args.table, markdown(report))


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
