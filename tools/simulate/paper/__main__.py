# SPDX-License-Identifier: Apache-2.0
"""Recomputes the paper's tables and figures from its own inputs, and prints both side by side.

    python -m tools.simulate.paper
    python -m tools.simulate.paper --json

The same as `python -m tools.simulate paper`. Nothing is fitted to a single cell; fits to a row or a
table are marked. docs/paper.md summarises which numbers follow and which do not.

Exit status: 0 if the computation ran; a difference from the paper is not an error.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table

from tools.lab.arguments import Parser
from tools.lab.figures import print_json
from tools.lab.tables import table
from tools.simulate.paper import memory, tables
from tools.simulate.paper.cells import Cell, Constants, Verdict, all_cells, fit_all
from tools.simulate.paper.claims import Claim, all_claims

PIPE_WIDTH = 120
FOLLOWS = {
    Verdict.FOLLOWS: 'yes', Verdict.DIFFERS: 'no', Verdict.INPUT: 'input',
    Verdict.NO_INPUTS: 'no inputs', Verdict.FINDING: '',
}  # fmt: skip
STYLES = {Verdict.FOLLOWS: 'green', Verdict.DIFFERS: 'red'}
TITLES = {
    'ettr': 'ETTR',
    'recovery_s': 'seconds of recovery in a run',
    'overhead_percent': 'overhead, percent of an iteration',
    'overhead_s': 'overhead, seconds per iteration',
    'interval': 'iterations between checkpoints',
    'host_gb': 'host memory, GB',
    'windows_gb': 'host memory of windows, GB',
    'logs_gb': 'host memory of logs, GB',
    'total_gb': 'host memory, GB',
    'more_percent': 'host memory beyond that of Gemini, percent',
}


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
    constants = fit_all()
    fits = {(one.table, one.setting, one.system): one for one in constants}
    cells, known = [*all_cells(fits), *memory.table6_cells()], tables.ettr_tables()
    times = {
        name: {setting.name: setting.iteration_s for setting in table.settings}
        for name, table in known.items()
    }
    notes = [(name, *note) for name, table in known.items() for note in table.notes]
    return Report(times, cells, constants, all_claims(fits), count(cells), notes)


def count(cells: Iterable[Cell]) -> list[Count]:
    """Number of judged cells that follow, by system and quantity."""
    kinds: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.verdict in STYLES:
            kinds.setdefault((cell.system, cell.quantity), []).append(cell)

    def follow(verdicts: Iterable[Verdict | None]) -> int:
        return list(verdicts).count(Verdict.FOLLOWS)

    return [
        Count(
            *kind,
            len(found),
            follow(cell.verdict for cell in found),
            follow(cell.fitted_verdict for cell in found) if found[0].fitted_verdict else None,
        )
        for kind, found in kinds.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog='python -m tools.simulate paper',
        description='Recompute the tables and figures of the paper.',
    )
    parser.add_argument('--json', action='store_true', help='print everything as JSON instead')
    args = parser.parse_args(argv)
    report = recompute()
    if args.json:
        print_json(report)
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=PIPE_WIDTH))
    return 0


def print_report(report: Report, console: Console) -> None:
    """Print tables of computed and printed numbers, constants, claims, notes and counts."""
    for (name, quantity), found in groupby(
        sorted(report.cells, key=_table_and_quantity), key=_table_and_quantity
    ):
        console.print(cell_table(f'{name}: {TITLES[quantity]}', list(found)))
    console.print(claim_table(report.claims))
    console.print(constant_table(report.constants))
    console.print('Iteration times, never printed: seconds over percent of the overhead of MoC.')
    for name, times in report.iteration_s.items():
        values = ', '.join(f'{setting} {seconds:.2f} s' for setting, seconds in times.items())
        console.print(f'{name}: {values}', highlight=False)
    console.print('Cells that could not be read, or that are odd:')
    for name, cell, note in report.notes:
        console.print(f'  {name}, {cell}: {note}', highlight=False, markup=False)
    console.print()
    console.print(summary(report), style='bold', highlight=False)


def _plain(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]],
    styles: Iterable[str | None] | None = None,
) -> Table:  # fmt: skip
    return table(columns, rows, styles, title=title, title_justify='left', box=None, padding=(0, 1))


def cell_table(title: str, cells: Sequence[Cell]) -> Table:
    columns = '!setting !system !MTBF >!paper >!ours >!differs_by >!exact >!fitted !follows'
    rows = (
        (cell.setting, cell.system, cell.mtbf or 'all', _number(cell, cell.theirs),
         _number(cell, cell.ours), _number(cell, cell.difference, '+'), _number(cell, cell.exact),
         _number(cell, cell.fitted), FOLLOWS[cell.verdict])
        for cell in cells
    )  # fmt: skip
    headings = [name.replace('_', ' ') for name in columns.split()]
    return _plain(title, headings, rows, [STYLES.get(cell.verdict) for cell in cells])


def claim_table(claims: Sequence[Claim]) -> Table:
    columns = ('where', 'what', '>!paper', '>!ours', '>!differs by', '!follows', 'ours from')
    rows = (
        (
            claim.source,
            claim.statement,
            *('' if value is None else f'{value:.4g}'
              for value in (claim.theirs, claim.ours, claim.difference)),
            FOLLOWS[claim.verdict],
            claim.how,
        )
        for claim in claims
    )  # fmt: skip
    return _plain('Figures and text', columns, rows, [STYLES.get(one.verdict) for one in claims])


def constant_table(constants: Iterable[Constants]) -> Table:
    """Constants fitted to each row of ETTRs."""
    title = 'Fitted to the ETTRs of a setting and system, one pair for all MTBFs'
    columns = ('!table', '!setting', '!system', '>s more per iteration', '>s per restart',
               '>cells', '>within 1.5 points')  # fmt: skip
    rows = (
        (one.table, one.setting, one.system, f'{one.extra_s:.3f}', f'{one.restart_s:.0f}',
         str(one.cells), str(one.within))
        for one in constants
    )  # fmt: skip
    return _plain(title, columns, rows)


def summary(report: Report) -> str:
    systems = (tables.CHECKFREQ, tables.GEMINI, tables.MOC, tables.MOEVEMENT)
    ettr, recovery = (
        ', '.join(f'{one.system} {one.follow} of {one.cells}' for one in found)
        for found in (
            [report.count(system, quantity) for system in systems]
            for quantity in ('ettr', 'recovery_s')
        )
    )
    within = sum(one.within for one in report.constants)
    cells = sum(one.cells for one in report.constants)
    verdicts = [claim.verdict for claim in report.claims if claim.verdict in STYLES]
    return (
        f'ETTRs within 1.5 points with nothing fitted: {ettr}; with two constants fitted per row: '
        f'dense systems {within} of {cells}. Recoveries within 10 %: {recovery}. Figures and text: '
        f'{verdicts.count(Verdict.FOLLOWS)} of {len(verdicts)}.'
    )


def _table_and_quantity(cell: Cell) -> tuple[str, str]:
    return cell.table, cell.quantity


def _number(cell: Cell, value: float | None, sign: str = '') -> str:
    if value is None:
        return ''
    digits = {'ettr': 3, 'overhead_s': 2}.get(cell.quantity, 1)
    return f'{value:{sign}.{digits}f}'


if __name__ == '__main__':
    sys.exit(main())
