# SPDX-License-Identifier: Apache-2.0
"""Recomputes the paper's tables and figures from its own inputs, and prints both side by side.

    moevement simulate paper
    moevement simulate paper --json

Nothing is fitted to a single cell; fits to a row or a
table are marked. docs/paper.md summarises which numbers follow and which do not.

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


class Count(msgspec.Struct, frozen=True):
    """Cells of one system and quantity, over all tables."""

    system: str
    quantity: str
    cells: int
    follow: int
    fitted_follow: int | None
    """Number with the fitted constants; None without a fit."""


class Report(msgspec.Struct, frozen=True):
    """All recomputed results."""

    iteration_s: dict[str, dict[str, float]]
    """Iteration times by table and setting, which the paper does not print."""
    cells: list[Cell]
    constants: list[Constants]
    """All fitted constants, per setting and system."""
    claims: list[Claim]
    counts: list[Count]
    notes: list[tuple[str, str, str]]
    """Table, cell, and the unreadable or corrected value."""

    def count(self, system: str, quantity: str) -> Count:
        """The count of one system and quantity."""
        return next(one for one in self.counts if (one.system, one.quantity) == (system, quantity))


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
    return Report(times, cells, constants, all_claims(fits), count(cells), notes)


def count(cells: Iterable[Cell]) -> list[Count]:
    """Number of judged cells that follow, by system and quantity."""
    kinds: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.verdict in STYLES:
            kinds.setdefault((cell.system, cell.quantity), []).append(cell)
    counts = []
    for kind, found in kinds.items():
        plain = sum(one.verdict == Verdict.FOLLOWS for one in found)
        fitted = sum(one.fitted_verdict == Verdict.FOLLOWS for one in found)
        counts.append(Count(*kind, len(found), plain, fitted if found[0].fitted_verdict else None))
    return counts


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
        cells = list(found)
        show(
            f'{name}: {title}',
            '!setting|!system|!MTBF|>!paper|>!ours|>!differs by|>!exact|>!fitted|!follows',
            ((cell.setting, cell.system, cell.mtbf or 'all', _number(cell.theirs, f'.{digits}f'),
              _number(cell.ours, f'.{digits}f'), _difference(cell, f'+.{digits}f'),
              _number(cell.exact, f'.{digits}f'), _number(cell.fitted, f'.{digits}f'),
              FOLLOWS[cell.verdict]) for cell in cells),
            cells,
        )  # fmt: skip
    show(
        'Figures and text',
        'where|what|>!paper|>!ours|>!differs by|!follows|ours from',
        ((claim.source, claim.statement, _number(claim.theirs, '.4g'), _number(claim.ours, '.4g'),
          _difference(claim, '.4g'), FOLLOWS[claim.verdict], claim.how)
         for claim in report.claims),
        report.claims,
    )  # fmt: skip
    show(
        'Fitted to the ETTRs of a setting and system, one pair for all MTBFs',
        '!table|!setting|!system|>s more per iteration|>s per restart|>cells|>within 1.5 points',
        ((one.table, one.setting, one.system, f'{one.extra_s:.3f}', f'{one.restart_s:.0f}',
          str(one.cells), str(one.within)) for one in report.constants),
    )  # fmt: skip
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
    systems = (*DENSE, MOC, MOEVEMENT)
    ettr, recovery = (
        ', '.join(
            f'{one.system} {one.follow} of {one.cells}'
            for one in (report.count(system, quantity) for system in systems)
        )
        for quantity in ('ettr', 'recovery_s')
    )
    within = sum(one.within for one in report.constants)
    cells = sum(one.cells for one in report.constants)
    verdicts = [claim.verdict for claim in report.claims if claim.verdict in STYLES]
    return (
        f'ETTRs within 1.5 points with nothing fitted: {ettr}; with two constants fitted per row: '
        f'dense systems {within} of {cells}. Recoveries within 10 %: {recovery}. Figures and text: '
        f'{verdicts.count(Verdict.FOLLOWS)} of {len(verdicts)}.'
    )


def _difference(one: Cell | Claim, form: str) -> str:
    return '' if one.ours is None or one.theirs is None else format(one.ours - one.theirs, form)


def _number(value: float | None, form: str) -> str:
    return '' if value is None else format(value, form)


if __name__ == '__main__':
    sys.exit(main())
