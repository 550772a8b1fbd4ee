# SPDX-License-Identifier: Apache-2.0
"""Recomputes the paper's tables and figures from its own inputs, and prints both side by side.

    python -m tools.simulate.paper
    python -m tools.simulate.paper --json

The same as `python -m tools.simulate paper`. Nothing is fitted to a single cell; what is fitted
to a row or a table is said so. docs/paper.md sums up what follows and what does not.

Exit status: 0 whenever the computation ran; to disagree with the paper is no error.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table

from tools.lab.arguments import Parser
from tools.simulate.paper import fit, tables
from tools.simulate.paper.compare import Cell, Claim, Verdict
from tools.simulate.paper.report import Report, recompute

PIPE_WIDTH = 120
FOLLOWS = {
    Verdict.FOLLOWS: 'yes',
    Verdict.DIFFERS: 'no',
    Verdict.INPUT: 'input',
    Verdict.NO_INPUTS: 'no inputs',
    Verdict.FINDING: '',
}
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = Parser(
        prog='python -m tools.simulate paper',
        description='Recompute the tables and figures of the paper.',
    )
    parser.add_argument('--json', action='store_true', help='print everything as JSON instead')
    args = parser.parse_args(argv)
    report = recompute()
    if args.json:
        encoded = msgspec.json.encode(report)
        sys.stdout.write(msgspec.json.format(encoded, indent=1).decode() + '\n')
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=PIPE_WIDTH))
    return 0


def print_report(report: Report, console: Console) -> None:
    """Tables with ours beside theirs, constants, claims, notes and the counts."""
    for (name, quantity), found in groupby(
        sorted(report.cells, key=_table_and_quantity), key=_table_and_quantity
    ):
        console.print(cell_table(f'{name}: {TITLES[quantity]}', found))
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


def cell_table(title: str, cells: Iterable[Cell]) -> Table:
    """One row per cell of one quantity."""
    table = Table(title=title, title_justify='left', box=None, padding=(0, 1))
    for heading in ('setting', 'system', 'MTBF'):
        table.add_column(heading, no_wrap=True)
    for heading in ('paper', 'ours', 'differs by', 'exact', 'fitted'):
        table.add_column(heading, justify='right', no_wrap=True)
    table.add_column('follows', no_wrap=True)
    for cell in cells:
        table.add_row(
            cell.setting,
            cell.system,
            cell.mtbf or 'all',
            *(_number(cell, value) for value in (cell.theirs, cell.ours)),
            _number(cell, cell.difference, '+'),
            *(_number(cell, value) for value in (cell.exact, cell.fitted)),
            FOLLOWS[cell.verdict],
            style=STYLES.get(cell.verdict),
        )
    return table


def claim_table(claims: Iterable[Claim]) -> Table:
    """One row per number of a figure or of the text."""
    table = Table(title='Figures and text', title_justify='left', box=None, padding=(0, 1))
    for heading in ('where', 'what'):
        table.add_column(heading)
    for heading in ('paper', 'ours', 'differs by'):
        table.add_column(heading, justify='right', no_wrap=True)
    table.add_column('follows', no_wrap=True)
    table.add_column('ours from')
    for claim in claims:
        numbers = (claim.theirs, claim.ours, claim.difference)
        table.add_row(
            claim.source,
            claim.statement,
            *('' if value is None else f'{value:.4g}' for value in numbers),
            FOLLOWS[claim.verdict],
            claim.how,
            style=STYLES.get(claim.verdict),
        )
    return table


def constant_table(constants: Iterable[fit.Constants]) -> Table:
    """What was fitted to each row of ETTRs."""
    table = Table(
        title='Fitted to the ETTRs of a setting and system, one pair for all MTBFs',
        title_justify='left',
        box=None,
        padding=(0, 1),
    )
    for heading in ('table', 'setting', 'system'):
        table.add_column(heading, no_wrap=True)
    for heading in ('s more per iteration', 's per restart', 'cells', 'within 1.5 points'):
        table.add_column(heading, justify='right')
    for one in constants:
        table.add_row(
            one.table,
            one.setting,
            one.system,
            f'{one.extra_s:.3f}',
            f'{one.restart_s:.0f}',
            str(one.cells),
            str(one.within),
        )
    return table


def summary(report: Report) -> str:
    """The counts, in a line."""
    systems = (tables.CHECKFREQ, tables.GEMINI, tables.MOC, tables.MOEVEMENT)
    ettr = [report.count(system, 'ettr') for system in systems]
    recovery = [report.count(system, 'recovery_s') for system in systems]
    within = sum(one.within for one in report.constants)
    cells = sum(one.cells for one in report.constants)
    claims = [claim for claim in report.claims if claim.verdict in STYLES]
    follow = sum(claim.verdict == Verdict.FOLLOWS for claim in claims)
    return (
        'ETTRs within 1.5 points with nothing fitted: '
        + ', '.join(f'{one.system} {one.follow} of {one.cells}' for one in ettr)
        + f'; with two constants fitted per row: dense systems {within} of {cells}. '
        + 'Recoveries within 10 %: '
        + ', '.join(f'{one.system} {one.follow} of {one.cells}' for one in recovery)
        + f'. Figures and text: {follow} of {len(claims)}.'
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
