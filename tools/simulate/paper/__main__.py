# SPDX-License-Identifier: Apache-2.0
"""Recomputes the paper's tables and figures from its own inputs, and prints both side by side.

    moevement simulate paper
    moevement simulate paper --json

Nothing is fitted to a single cell; fits to a row or a table are marked. docs/paper.md summarises
which numbers follow and which do not.

Exit status: 0 if the computation ran; a difference from the paper is not an error.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec
from rich.console import Console

from ...lab.arguments import Parser
from ...lab.figures import print_json
from ...lab.tables import table
from .claims import Claim, all_claims
from .tables import (
    DENSE,
    MOC,
    MOEVEMENT,
    PAPER,
    ROWS,
    TABLES,
    Cell,
    Constants,
    Verdict,
    all_cells,
    fit,
    table6_cells,
)  # fmt: skip

PIPE_WIDTH = 120
FOLLOWS = {
    Verdict.FOLLOWS: 'yes', Verdict.DIFFERS: 'no', Verdict.INPUT: 'input',
    Verdict.NO_INPUTS: 'no inputs', Verdict.FINDING: '',
}  # fmt: skip
STYLES = {Verdict.FOLLOWS: 'green', Verdict.DIFFERS: 'red'}


class Report(msgspec.Struct, frozen=True):
    """All recomputed results."""

    iteration_s: dict[str, dict[str, float]]
    """Iteration times by table and setting, which the paper does not print."""
    cells: list[Cell]
    constants: list[Constants]
    """All fitted constants, per setting and system."""
    claims: list[Claim]
    notes: list[tuple[str, str, str]]
    """Table, cell, and the unreadable or corrected value."""


def recompute() -> Report:
    """Recompute every readable cell of Tables 3, 6 and 7, and the claims of text and figures."""
    constants = [fit(row, found) for row, found in ROWS.items() if row[2] in DENSE]
    fits = {(one.table, one.setting, one.system): one for one in constants}
    cells = [*all_cells(fits), *table6_cells()]
    times = {
        name: {setting.name: setting.iteration_s for setting in table.settings}
        for name, table in TABLES.items()
    }
    notes = [(name, *note) for name, table in TABLES.items() for note in table.notes]
    return Report(times, cells, constants, all_claims(fits), notes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog='moevement simulate paper',
        description='Recompute the tables and figures of the paper.',
    )
    parser.add_argument('--json', action='store_true', help='print everything as JSON instead')
    report = recompute()
    if parser.parse_args(argv).json:
        print_json(report)
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=PIPE_WIDTH))
    return 0


def print_report(report: Report, console: Console) -> None:
    """Print tables of computed and printed numbers, claims, constants, notes and counts."""

    def show(
        title: str, columns: str, rows: Iterable[Sequence[str]], judged: Sequence = ()
    ) -> None:
        console.print(
            table(columns.split('|'), rows, [STYLES.get(one.verdict) for one in judged] or None,
                  title=title, title_justify='left', box=None, padding=(0, 1))
        )  # fmt: skip

    kind = attrgetter('table', 'quantity')
    for (name, quantity), found in groupby(sorted(report.cells, key=kind), key=kind):
        title, digits = PAPER.quantities[quantity]
        cells, form = list(found), f'.{digits}f'
        show(
            f'{name}: {title}',
            '!setting|!system|!MTBF|>!paper|>!ours|>!differs by|!follows|>!exact|>!fitted',
            ((one.setting, one.system, one.mtbf or 'all', *_compared(one, form, f'+{form}'),
              _number(one.exact, form), _number(one.fitted, form)) for one in cells),
            cells,
        )  # fmt: skip
    show(
        'Figures and text',
        'where|what|>!paper|>!ours|>!differs by|!follows|ours from',
        ((one.source, one.statement, *_compared(one, '.4g', '.4g'), one.how)
         for one in report.claims),
        report.claims,
    )  # fmt: skip
    show(
        'Fitted to the ETTRs of a setting and system, one pair for all MTBFs',
        '!table|!setting|!system|>s more per iteration|>s per restart|>cells|>within 1.5 points',
        (tuple(map(str, msgspec.structs.astuple(one))) for one in report.constants),
    )
    console.print('Iteration times, never printed: seconds over percent of the overhead of MoC.')
    for name, times in report.iteration_s.items():
        values = ', '.join(f'{setting} {seconds:.2f} s' for setting, seconds in times.items())
        console.print(f'{name}: {values}', highlight=False)
    console.print('Cells that could not be read, or that are odd:')
    for name, cell, note in report.notes:
        console.print(f'  {name}, {cell}: {note}', highlight=False, markup=False)
    console.print()
    console.print(summary(report), style='bold', highlight=False)


def summary(report: Report) -> str:
    def follow(quantity: str) -> str:
        cells = [one for one in report.cells if one.quantity == quantity]
        return ', '.join(
            f'{system} {_following([one for one in cells if one.system == system])}'
            for system in (*DENSE, MOC, MOEVEMENT)
        )

    within, cells = (sum(getattr(one, name) for one in report.constants)
                     for name in ('within', 'cells'))  # fmt: skip
    return (
        f'ETTRs within 1.5 points with nothing fitted: {follow("ettr")}; with two constants fitted '
        f'per row: dense systems {within} of {cells}. Recoveries within 10 %: '
        f'{follow("recovery_s")}. Figures and text: {_following(report.claims)}.'
    )


def _following(judged: Iterable[Cell | Claim]) -> str:
    verdicts = [one.verdict for one in judged if one.verdict in STYLES]
    return f'{verdicts.count(Verdict.FOLLOWS)} of {len(verdicts)}'


def _compared(one: Cell | Claim, form: str, change: str) -> tuple[str, ...]:
    """Their number, ours, the difference, and whether it follows."""
    difference = None if one.ours is None or one.theirs is None else one.ours - one.theirs
    return (_number(one.theirs, form), _number(one.ours, form), _number(difference, change),
            FOLLOWS[one.verdict])  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return '' if value is None else format(value, form)


if __name__ == '__main__':
    sys.exit(main())
