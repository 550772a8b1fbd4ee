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
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..bench.comeback import PHASES
from ..bench.frame import Bench, Figure, Report
from ..lab.drawing import FAILURE, MUTED, OWN, PALETTE, picture, subtitle
from . import peers
from .measuring import RowRun, figures, goodput, pace_s, span_s
from .rows import ROWS, chosen
from .running import RANKS, STATE_BYTES, Course, Lived, draw_faults

PICTURE = 'compare-goodput.png'
_BIN_S = 2.0
# Faults are drawn between these parts of plain Megatron's duration after the warm-up.
_FIRST, _LAST = 0.2, 0.8
_LEAST_NETWORK_GB_PER_S = 0.02
# Number of intervals after which each row has a complete checkpoint.
_INTERVALS_OF_WARM_UP = 2
# Defaults by flag: with --quick, and without.
_SIZES = {'iterations': (32, 120), 'faults': (2, 4), 'interval': (4, 6)}


def _phase(heading: str, name: str) -> Figure:
    return Figure(heading, '.1f', lambda run, _: run.phases.get(name, 0.0), ranged=False)


class CompareBench(Bench):
    """Rows under the same trace of failures, relative to plain Megatron in the same round."""

    PROG, OUTPUT, ROUNDS = 'moevement compare', 'runs/compare', 2
    WORDS = {'rows': ','.join(ROWS)}
    FIGURES = {
        'period': Figure('I or W', '.0f'),
        'ratio': Figure('iteration'),
        'mbytes': Figure('MB/it', '.2f', ranged=False),
        'stall_ms': Figure('stall/it ms', '.0f', ranged=False),
        'recovery_s': Figure('recovery s', '.1f'),
        'start_s': _phase('of it start', PHASES[0]),
        'restore_s': _phase('restore', PHASES[1]),
        'again_s': _phase('again', PHASES[2]),
        'again': Figure('stage-it again', '.1f', ranged=False),
        'lost_tokens': Figure('PLT', '.1%', ranged=False),
        'loss': Figure('loss diff', of=lambda run, _: f'{run.loss:+.4f}' if run.loss else '0'),
        'bits': Figure('bits'),
        'ettr': Figure('ETTR'),
        'ettr_warm': Figure('warm'),
    }

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        args.rounds = args.rounds or (1 if args.quick else cls.ROUNDS)
        for name, (quick, full) in _SIZES.items():
            setattr(args, name, getattr(args, name) or (quick if args.quick else full))
        if args.iterations < (least := 4 * _INTERVALS_OF_WARM_UP * args.interval):
            parser.error(
                f'--iterations {args.iterations}: must be at least {least}, 8 x --interval'
            )
        try:
            args.rows = list(chosen(args.rows, args.quick))
        except ValueError as error:
            parser.error(str(error))

    def __init__(self, args: argparse.Namespace, output: Path, data: Path) -> None:
        super().__init__(args, output, data)
        # At most twelve evaluations, most of them in iterations without a dense checkpoint.
        evaluate = args.iterations // 12 + 1
        while math.gcd(evaluate, args.interval) > 1:
            evaluate += 1
        self._course = Course(
            data,
            output,
            iterations=args.iterations,
            warm_up=_INTERVALS_OF_WARM_UP * args.interval,
            evaluate=evaluate,
            interval=args.interval,
            window=args.window,
            fork=args.quick,
        )
        self._plain: dict[tuple[int, bool], Lived] = {}
        """Plain Megatron, by round, and whether optimizers are copies."""
        self._loads: list[float] = []

    def titles(self) -> Mapping[str, str]:
        rows = ((name, ROWS[name]) for name in self.args.rows)
        return {name: row.title if row.throttled else f'{row.title} *' for name, row in rows}

    def may_fail(self, way: str) -> bool:
        return True

    def line(self, one: RowRun) -> str:
        return f'ETTR {one.ettr:.3f}, recovery {one.recovery_s:5.1f} s'

    def begin(self, number: int) -> None:
        """Run plain Megatron; its pace in the first round determines trace and limits."""
        self._loads.append(os.getloadavg()[0])
        log = self._beside(number, copies=False).trained.log
        if number > 1:
            return
        args, span = self.args, span_s(log)
        copy = STATE_BYTES / (args.dense_copy * pace_s(log)) / 1e9
        self._course = self._course._replace(
            copy_gb_per_s=copy,
            network_gb_per_s=max(2 * copy, _LEAST_NETWORK_GB_PER_S),
            mtbf_s=span / args.faults,
            faults=draw_faults(args.seed, args.faults, _FIRST * span, _LAST * span, RANKS),
        )

    def _beside(self, number: int, copies: bool) -> Lived:
        if (number, copies) not in self._plain:
            self._plain[number, copies] = self._course.plain(number, copies)
        return self._plain[number, copies]

    def run(self, way: str, number: int) -> RowRun:
        row = ROWS[way]
        plain = self._beside(number, row.copies)
        return figures(row, self._course.hurt(number, way, row), plain, self._course)

    def different(self, rounds: Sequence[Mapping[str, RowRun]]) -> list[str]:
        return [way for way in self.args.rows if ROWS[way].exact and self._different(way, rounds)]

    def _different(self, way: str, rounds: Sequence[Mapping[str, RowRun]]) -> list[str]:
        return sorted({kind for one in rounds if way in one for kind in one[way].different})

    def notes(self, report: Report) -> Iterator[str]:
        course = self._course
        faults = (f'{one.kind} of rank {one.rank} at {one.at_s:.1f} s' for one in course.faults)
        logs = (one.trained.log for (_, copies), one in self._plain.items() if not copies)
        yield (
            f'{RANKS} ranks on {RANKS} emulated nodes, {course.iterations} iterations, of '
            f'{", ".join(f"{pace_s(log):.2f}" for log in logs)} s in plain Megatron; load '
            f'{", ".join(f"{load:.1f}" for load in self._loads)} at the start of each round.'
        )
        yield f'Measured from iteration {course.warm_up} on; seconds after it: {", ".join(faults)}.'
        yield (
            f'Copies to host memory are limited to {1000 * course.copy_gb_per_s:.4g} MB/s, sends '
            f'of windows to {1000 * course.network_gb_per_s:.4g} MB/s a rank, but not in rows '
            'with *.'
        )
        yield (
            'Workers are forks of a process that has imported the program, as warm as hot spares.'
            if course.fork
            else 'Workers are new processes, unless a row has a hot spare.'
        )
        measured = course.iterations - course.warm_up
        for name, way in report.ways.items():
            if 'period' in way.figures and way.figures['period'].max > measured:
                yield (
                    f'{way.title}: its interval exceeds the {measured} measured iterations, which '
                    'have little of the cost of its checkpoints; take more --iterations.'
                )
            if name in report.different:
                kinds = ', '.join(self._different(name, report.rounds))
                yield f'{way.title}: the final state differs in {kinds}.'

    @classmethod
    def draw(cls, args: argparse.Namespace, report: Report) -> None:
        """Draw a strip for each row: how much of each moment was kept, and the faults."""
        if args.plot is None:
            return
        with picture(args.plot / PICTURE, figsize=(9, 1.2 + 0.42 * len(report.ways))) as axes:
            axes.set_title('Goodput over the trace of failures')
            kept = f'share of each {_BIN_S:g} s in iterations that were kept'
            subtitle(axes, f'{kept}; violet: loses updates; red: a failure')
            ways = dict(sorted(report.ways.items(), key=lambda one: ROWS[one[0]].lossy))
            for place, (name, way) in enumerate(ways.items()):
                color = PALETTE[1] if ROWS[name].lossy else OWN
                last = next(one[name] for one in reversed(report.rounds) if name in one)
                style = {'height': 0.7, 'color': color, 'linewidth': 0}
                for number, share in enumerate(goodput(last.curves, last.iteration_s, _BIN_S)):
                    alpha = float(min(max(share, 0.02), 1))
                    axes.barh(place, _BIN_S, left=number * _BIN_S, alpha=alpha, **style)
                axes.vlines(last.curves.faults, place - 0.42, place + 0.42, FAILURE, linewidth=2)
                ettr = f'{way.figures["ettr"].median:.2f}'
                axes.text(last.curves.kept[-1] + _BIN_S, place, ettr, va='center', color=MUTED)
            axes.set_yticks(range(len(ways)), [way.title for way in ways.values()])
            axes.invert_yaxis()
            axes.grid(axis='y', visible=False)
            axes.set_xlim(left=0)
            axes.set_xlabel('seconds since the warm-up; beside each strip: ETTR')


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ['peers']:
        return peers.main(given[1:])
    return CompareBench.main(given)


if __name__ == '__main__':
    sys.exit(main())
