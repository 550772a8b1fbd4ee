# SPDX-License-Identifier: Apache-2.0
"""Recomputes the paper's tables from its own inputs, and prints both side by side.

    moevement simulate paper
    moevement simulate paper --json

Inputs are the iteration times, the windows, the intervals and the overheads in seconds. A global
rollback loses half an interval, MoEvement 3/2 of a window (paper, appendix C), MoC one iteration.

`paper.toml` has the numbers that the paper prints, and claims of its text, its figures and Table 6
with what follows from its inputs. docs/paper.md summarises which numbers follow and which do not.

Exit status: 0 if the computation ran; a difference from the paper is not an error.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from importlib.resources import files
from itertools import cycle, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from moevement_ext.plan.strategy.dense import young_s

from ..lab.figures import print_json
from ..lab.programs import program
from ..lab.tables import say, table
from .closed_form import Dense, Sparse

CHECKFREQ, GEMINI, MOC, MOEVEMENT = SYSTEMS = 'CheckFreq', 'Gemini', 'MoC', 'MoEvement'


class Setting(msgspec.Struct, frozen=True):
    """A model, or a choice of precisions."""

    name: str
    iteration_s: float
    window: int
    systems: dict[str, dict[str, list[float]]]
    """By system and quantity, a value per MTBF or one for all; nan is not readable."""


class Table(msgspec.Struct, frozen=True):
    """Table 3 or Table 7."""

    name: str
    run_s: float
    mtbf_s: dict[str, float]
    """Mean seconds between failures, by the name of the column."""
    settings: list[Setting]
    notes: list[tuple[str, str]]
    """A cell, and its unreadable or corrected value."""


class Verdict(StrEnum):
    """Result of the comparison with the paper.

    INPUT: an input of the others, which cannot be recomputed. NO_INPUTS: the paper does not give
    the inputs of the number. FINDING: only computed, the paper does not print it.
    """

    FOLLOWS = 'follows'
    DIFFERS = 'differs'
    INPUT = 'input'
    NO_INPUTS = 'no inputs'
    FINDING = 'finding'


class Claim(msgspec.Struct, frozen=True):
    """A number of a figure, of Table 6 or of the text; nan: not printed, or without inputs."""

    source: str
    statement: str
    theirs: float
    ours: float
    verdict: Verdict
    how: str


class Paper(msgspec.Struct, frozen=True):
    """The whole file."""

    claims: list[tuple[str, str, float, float, Verdict, str]]
    """Fields of Claim."""
    tables: list[Table]
    quantities: dict[str, tuple[str, int]]


class Condition(NamedTuple):
    """The paper's inputs of a system at one MTBF."""

    setting: Setting
    system: str
    mtbf: str
    mtbf_s: float
    failures: float
    """Expected number of failures in a run."""
    interval: float
    overhead_s: float

    @property
    def costs(self) -> Dense | Sparse:
        iteration_s, overhead_s, mtbf_s = self.setting.iteration_s, self.overhead_s, self.mtbf_s
        if self.system == MOEVEMENT:
            return Sparse(iteration_s, self.setting.window, overhead_s, mtbf_s=mtbf_s)
        return Dense(iteration_s, int(self.interval), overhead_s, mtbf_s=mtbf_s)


PAPER = msgspec.toml.decode(files(__package__).joinpath('paper.toml').read_bytes(), type=Paper)
ROWS: dict[tuple[str, str, str], list[Condition]] = {
    (table.name, setting.name, system): [
        Condition(setting, system, *mtbf, table.run_s / mtbf[1], interval, overhead_s)
        for mtbf, interval, overhead_s in zip(
            table.mtbf_s.items(), cycle(by['interval']), cycle(by['overhead_s']), strict=False
        )
    ]
    for table in PAPER.tables
    for setting in table.settings
    for system, by in setting.systems.items()
}
"""Conditions by MTBF, of each table, setting and system."""

ETTR_TOLERANCE = 0.015
"""1.5 points: the largest difference that the paper reports for its own simulator (Table 4)."""
_SCALED = 0.1  # relative; seconds of recovery and intervals scale with their inputs
_PIPE_WIDTH = 120
_STYLES = {Verdict.FOLLOWS: 'green', Verdict.DIFFERS: 'red'}
_BARE: dict[str, Any] = {'title_justify': 'left', 'box': None, 'padding': (0, 1)}
_FOLLOWS = {Verdict.FOLLOWS: 'yes', Verdict.DIFFERS: 'no', Verdict.FINDING: ''}


class Cell(msgspec.Struct, frozen=True):
    """A readable cell of a table."""

    table: str
    setting: str
    system: str
    quantity: str
    mtbf: str
    """Column; empty if the cell is for all columns."""
    theirs: float
    verdict: Verdict
    ours: float = math.nan
    """Computed from the paper's own inputs, without a fit."""
    exact: float = math.nan
    """Result of the exact renewal form instead of the first-order form."""


class Report(msgspec.Struct, frozen=True):
    """All recomputed results."""

    cells: list[Cell]
    claims: list[Claim]
    notes: list[tuple[str, str, str]]
    """Table, cell, and the unreadable or corrected value."""


def recompute() -> Report:
    """Recompute every readable cell of Tables 3 and 7; claims are as recorded."""
    notes = [(table.name, *note) for table in PAPER.tables for note in table.notes]
    return Report(list(_cells()), [Claim(*one) for one in PAPER.claims], notes)


def _cells() -> Iterator[Cell]:
    for row, conditions in ROWS.items():
        for quantity, printed in conditions[0].setting.systems[row[2]].items():
            for theirs, one in zip(printed, conditions, strict=False):
                if not math.isnan(theirs):
                    mtbf = one.mtbf if len(printed) > 1 else ''
                    yield _cell((*row, quantity, mtbf), theirs, one)


def _cell(names: tuple[str, str, str, str, str], theirs: float, one: Condition) -> Cell:
    iteration_s, exact, tolerance = one.setting.iteration_s, math.nan, _SCALED * theirs
    match names[3], one.system:
        case 'interval', 'Gemini':
            # The optimum for its costs against Young's, sqrt(2 c M) / T iterations (Young 1974), a
            # checkpoint costing its interval's overhead c.
            ours = young_s(one.overhead_s * one.interval, one.mtbf_s) / iteration_s
        case 'overhead_percent', _:
            ours = 100 * one.overhead_s / iteration_s
            tolerance = 0.5 + 100 * 0.005 / iteration_s  # both numbers are rounded
        case 'recovery_s', 'MoC':
            ours = one.failures * iteration_s
        case 'recovery_s', _:
            ours = one.failures * one.costs.expected_recovery_s()
        case 'ettr', _:
            ours, tolerance = one.costs.ettr_first_order(), ETTR_TOLERANCE
            exact = one.costs.ettr_exact()
        case 'interval', 'CheckFreq':  # needs a disk bandwidth that is not given
            return Cell(*names, theirs, Verdict.NO_INPUTS)
        case _:
            return Cell(*names, theirs, Verdict.INPUT)
    verdict = Verdict.FOLLOWS if abs(ours - theirs) <= tolerance + 1e-9 else Verdict.DIFFERS
    if names[2:4] == (MOC, 'overhead_percent'):  # the iteration times are derived from it
        verdict = Verdict.INPUT
    return Cell(*names, theirs, verdict, ours, exact)


# ---- the report


def main(argv: Sequence[str] | None = None) -> int:
    args, report = program('simulate paper', __doc__).parse_args(argv), recompute()
    if args.json:
        print_json(report)
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=_PIPE_WIDTH))
    return 0


def print_report(report: Report, console: Console) -> None:
    """Print tables of computed and printed numbers, claims, notes and counts."""

    def show[One: (Cell, Claim)](
        title: str, columns: str, rows: Iterable[Sequence[str]], judged: Sequence[One]
    ) -> None:
        styles = [_STYLES.get(one.verdict) for one in judged]
        console.print(table(columns.split('|'), rows, styles, title=title, **_BARE))

    kind = attrgetter('table', 'quantity')
    for (name, quantity), found in groupby(sorted(report.cells, key=kind), key=kind):
        title, digits = PAPER.quantities[quantity]
        cells, form = list(found), f'.{digits}f'
        columns = '!setting|!system|!MTBF|>!paper|>!ours|>!differs by|!follows|>!exact'
        rows = []
        for one in cells:
            judged = *_compared(one, form, f'+{form}'), _number(one.exact, form)
            rows.append((one.setting, one.system, one.mtbf or 'all', *judged))
        show(f'{name}: {title}', columns, rows, cells)
    columns = 'where|what|>!paper|>!ours|>!differs by|!follows|ours from'
    rows = [(c.source, c.statement, *_compared(c, '.4g', '.4g'), c.how) for c in report.claims]
    show('Table 6, figures and text', columns, rows, report.claims)
    say(console, 'Cells that could not be read, or that are odd:')
    for name, cell, note in report.notes:
        say(console, f'  {name}, {cell}: {note}')
    say(console, f'\n{summary(report)}')


def summary(report: Report) -> str:
    def follow(quantity: str) -> str:
        cells = [one for one in report.cells if one.quantity == quantity]
        return ', '.join(
            f'{system} {_following(one for one in cells if one.system == system)}'
            for system in SYSTEMS
        )

    return (
        f'ETTRs within 1.5 points with nothing fitted: {follow("ettr")}. Recoveries within 10 %: '
        f'{follow("recovery_s")}. Table 6, figures and text: {_following(report.claims)}.'
    )


def _following(judged: Iterable[Cell | Claim]) -> str:
    verdicts = [one.verdict for one in judged if one.verdict in _STYLES]
    return f'{verdicts.count(Verdict.FOLLOWS)} of {len(verdicts)}'


def _compared(one: Cell | Claim, form: str, change: str) -> tuple[str, ...]:
    """Their number, ours, the difference, and whether it follows."""
    numbers = (one.theirs, form), (one.ours, form), (one.ours - one.theirs, change)
    return *(_number(*number) for number in numbers), _FOLLOWS.get(one.verdict, one.verdict)


def _number(value: float, form: str) -> str:
    return '' if math.isnan(value) else format(value, form)


if __name__ == '__main__':
    sys.exit(main())
