# SPDX-License-Identifier: Apache-2.0
"""Recomputes the paper's tables and figures from its own inputs, and prints both side by side.

    moevement simulate paper
    moevement simulate paper --json

Nothing is fitted to a single cell; fits to a row or a table are marked. docs/paper.md summarises
which numbers follow and which do not. Claims are those of the text, figures 6, 10 and 11, appendix
D and Lazarus, and findings about the consistency of the tables.

Exit status: 0 if the computation ran; a difference from the paper is not an error.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from operator import attrgetter, itemgetter
from statistics import mean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from ..lab.arguments import Parser
from ..lab.figures import print_json
from ..lab.tables import say, table
from ..model.layout import PRECISIONS
from . import placement
from .experts import concentration, lost_by_checkpoint
from .printed import (
    CHECKFREQ,
    DENSE,
    DENSE_BYTES,
    ETTR_TOLERANCE,
    GEMINI,
    MOC,
    MOEVEMENT,
    PAPER,
    ROWS,
    T3,
    T7,
    TABLES,
    WEIGHT_BYTES,
    Cell,
    Condition,
    Constants,
    Fits,
    Setting,
    Verdict,
    all_cells,
    fit,
    judge,
    priced,
    slot_bytes,
    table6_cells,
)  # fmt: skip

COPY_BYTES_PER_S = 25e9
"""Rate to host memory of one A100 (PCIe 4, 25 of nominally 32 GB/s)."""
_PIPE_WIDTH = 120
_STYLES = {Verdict.FOLLOWS: 'green', Verdict.DIFFERS: 'red'}
_FOLLOWS = {
    Verdict.FOLLOWS: 'yes', Verdict.DIFFERS: 'no', Verdict.INPUT: 'input',
    Verdict.NO_INPUTS: 'no inputs', Verdict.FINDING: '',
}  # fmt: skip


class Claim(msgspec.Struct, frozen=True):
    """A number of a figure or of the text."""

    source: str
    statement: str
    theirs: float | None
    """None: a finding about the paper's numbers that the paper does not print."""
    ours: float | None
    verdict: Verdict
    how: str


def claim(
    key: str, ours: float | None, theirs: float | None = None, holds: bool | None = None,
    **fields: object,
) -> Claim:  # fmt: skip
    """A claim of the file, judged by its tolerance unless `holds` is the result.

    Args:
        key: name of the claim.
        ours: the computed number; None if the paper does not give its inputs.
        theirs: the printed number, unless the claim itself has it.
        holds: whether the claim follows.
        fields: values for the texts.
    """
    row = PAPER.claims[key]
    theirs = row.theirs if theirs is None else theirs
    if holds is not None:
        verdict = Verdict.FOLLOWS if holds else Verdict.DIFFERS
    elif ours is None:
        verdict = Verdict.NO_INPUTS
    else:
        verdict = Verdict.FINDING if theirs is None else judge(ours, theirs, row.tolerance)
    source, statement, how = (one.format(**fields) for one in (row.source, row.statement, row.how))
    return Claim(source, statement, theirs, ours, verdict, how)


def all_claims(fits: Fits) -> list[Claim]:
    """Claims on captures, windows and tables in the order of the paper's sections; then figures."""
    return [
        *_captures(), *_windows(), *_moevement(), *_dense_recoveries(), *_trace(fits), *_scaling(),
        *_moc(), *_skew(), *_lazarus(),
    ]  # fmt: skip


def _captures() -> Iterator[Claim]:
    """Sizes of slots and windows, and the work that frozen operators save."""
    slots, saving = slot_bytes(3) / DENSE_BYTES, PAPER.text['frozen_saving']
    yield claim('frozen operator', 1 - WEIGHT_BYTES / DENSE_BYTES)
    yield claim('first slot', 1 - float(slots[0]))
    yield claim('mean slot', 1 - float(slots.mean()))
    for window in (3, 5, 6):
        stored = float(slot_bytes(window).sum())
        yield claim('whole window', stored / DENSE_BYTES, window=window)
    for window in (3, 5, 6):
        share = (window - 1) / (2 * window)
        yield claim('frozen saving', saving * share, saving, window=window)
    for setting in TABLES[T7].settings:
        precision = PRECISIONS[setting.name.lower()]
        wide = msgspec.structs.replace(precision, compute='bf16')
        texts: dict[str, Any] = {'name': setting.name, 'wide': wide, 'precision': precision}
        key = 'full bytes' if precision.master == 'fp32' else 'full bytes, narrow master'
        yield claim(key, precision.full_bytes, setting.full_bytes, **texts)
        yield claim('weight bytes', precision.weight_bytes, setting.weight_bytes, **texts)


class Implied(NamedTuple):
    """Bandwidth in bytes/s, for the bytes of the whole model, that implies the printed window."""

    table: str
    setting: Setting
    least: float
    below: float


def implied_bandwidths() -> list[Implied]:
    """One range per setting of Tables 3 and 7.

    Algorithm 1 with equal operators needs W = ceil((A - F) / (b - F)) slots for a budget of b bytes
    per parameter and iteration, of A bytes in full and F of weights. So a window implies a range of
    budgets, and with the parameters and the iteration time a range of bandwidths.
    """

    def rate(one: Setting, slots: int) -> float:
        budget = one.weight_bytes + (one.full_bytes - one.weight_bytes) / slots
        return budget * (one.params_e9 * 1e9 / one.iteration_s)

    return [
        Implied(name, one, rate(one, one.window), rate(one, one.window - 1))
        for name, table in TABLES.items()
        for one in table.settings
    ]


def best_bandwidth(ranges: Sequence[Implied]) -> tuple[float, int]:
    """The bandwidth that implies most of the windows (fitted), and their number."""
    met = {
        one.least: sum(other.least <= one.least < other.below for other in ranges) for one in ranges
    }
    return max(met.items(), key=itemgetter(1))


def window_as_printed(setting: Setting, bandwidth: float) -> int | None:
    """W of Algorithm 1 at a bandwidth for the whole model; None if every window is too short."""
    budget = bandwidth * setting.iteration_s / (setting.params_e9 * 1e9)
    if budget <= setting.weight_bytes:
        return None
    step = setting.full_bytes - setting.weight_bytes
    return max(1, math.ceil(step / (budget - setting.weight_bytes) - 1e-9))


def _windows() -> Iterator[Claim]:
    """The windows of Tables 3 and 7; and W = 1 if each GPU copies its part over its own link."""
    ranges = implied_bandwidths()
    rate, _ = best_bandwidth(ranges)
    for one in ranges:
        window, theirs = window_as_printed(one.setting, rate), one.setting.window
        gigabytes = [value / 1e9 for value in (rate, one.least, one.below)]
        yield claim('window', window, theirs, window == theirs, one=one, gb=gigabytes)
    yield claim('share of a dense capture', max(
        one.full_bytes * one.params_e9 * 1e9 / table.gpus / COPY_BYTES_PER_S / one.iteration_s
        for table in TABLES.values() for one in table.settings
    ))  # fmt: skip


def _rows(name: str, system: str) -> Iterator[list[Condition]]:
    return (found for row, found in ROWS.items() if (row[0], row[2]) == (name, system))


def _moevement() -> Iterator[Claim]:
    """Consistency of MoEvement's own columns."""
    known = [(one, one.recovery_s / one.failures) for row in _rows(T3, MOEVEMENT) for one in row
             if not math.isnan(one.recovery_s)]  # fmt: skip
    reported = [seconds / priced(one).expected_recovery_s() for one, seconds in known]
    needed = [
        one.mtbf_s * (1 / (one.ettr * (1 + one.overhead_s / one.setting.iteration_s)) - 1) / seconds
        for one, seconds in known
        if one.mtbf == '10M'
    ]
    for key, ratios in (('reported recovery', reported), ('needed recovery', needed)):
        yield claim(key, min(ratios), end='least')
        yield claim(key, max(ratios), end='greatest')
    # The constant ETTR that meets most cells.
    ettr = np.array([one.ettr for row in ROWS.values() for one in row if one.system == MOEVEMENT])
    candidates = np.unique(ettr) + ETTR_TOLERANCE
    met = (np.abs(candidates[:, None] - ettr) <= ETTR_TOLERANCE + 1e-9).sum(axis=1)
    constant = candidates[met.argmax()]
    yield claim('one number', float(met.max()), constant=constant, cells=len(ettr))


def _dense_recoveries() -> Iterator[Claim]:
    """A hidden rule of the recovery columns of Table 3."""
    for gemini, checkfreq in zip(_rows(T3, GEMINI), _rows(T3, CHECKFREQ), strict=True):
        setting = gemini[0].setting
        seconds = [2 * one.recovery_s / one.failures / one.interval for one in gemini]
        ours = float(np.nanmedian(seconds))
        yield claim('iteration time', ours, setting.iteration_s, name=setting.name)
        rare, often = (one for one in checkfreq if one.mtbf in ('1H', '10M'))
        struck = often.recovery_s / (rare.recovery_s / rare.failures)
        yield claim('failures', struck, often.failures, name=setting.name)


def _trace(fits: Fits) -> Iterator[Claim]:
    """Section 5.3: DeepSeek-MoE over six hours of failures."""
    trace = PAPER.text['trace']
    minutes = trace['hours'] * 60 / trace['failures']
    yield claim('minutes between failures', minutes, trace['mtbf_min'])
    rare = {system: ROWS[T3, 'DeepSeek-MoE', system][0] for system in (*DENSE, MOC, MOEVEMENT)}
    for system in DENSE:
        assert rare[system].interval == trace['interval'][system]
        fitted = fits[T3, 'DeepSeek-MoE', system]
        for mtbf, constants in product((minutes, trace['mtbf_min']), (None, fitted)):
            ours, other = (priced(rare[name]._replace(mtbf_s=60 * mtbf), constants)
                           for name in (MOEVEMENT, system))  # fmt: skip
            ratio = ours.ettr_first_order() / other.ettr_first_order()
            key = 'goodput, fitted' if constants else 'goodput'
            yield claim(key, ratio, trace['goodput'][system], system=system, minutes=mtbf)
    yield claim('goodput over MoC', None)
    few, every = trace['moc_expert_share']
    share = rare[MOC].overhead_s / rare[MOC].setting.iteration_s
    yield claim("loss of MoC's goodput", 1 - (1 + share) / (1 + share * every / few))


def _scaling() -> Iterator[Claim]:
    """Figure 11; iteration times, windows and overheads of its models are not given."""
    scaling = PAPER.text['scaling']
    theirs, clusters, least = (scaling[name] for name in ('largest_10m', 'clusters', 'largest_1h'))
    for one in clusters:
        gpus = one['data_parallel'] * one['pipeline'] * scaling['expert_parallel']
        yield claim('GPUs', gpus, one['gpus'], **one)
    for system in (MOEVEMENT, GEMINI):
        ours = priced(ROWS[T3, 'DeepSeek-MoE', system][-1]).ettr_first_order()
        yield claim('largest at 10M', ours, theirs[system], system=system)
    yield claim('largest, speedup', theirs[MOEVEMENT] / theirs[GEMINI])
    recovery_s = 600 * (1 / theirs[MOEVEMENT] - 1)
    rare = 1 / (1 + recovery_s / 3600)
    yield claim('largest at 1H', rare, least, rare >= least, seconds=recovery_s)
    yield claim('GPU hours per failure', clusters[-1]['gpus'] / 6)


def _moc() -> Iterator[Claim]:
    """MoC-System's rule for K, and the ranges of its ETTR in the text."""
    rule = PAPER.text['moc']
    doublings = math.log2(rule['experts'] / rule['experts_saved'])
    # The state of an expert is (N/K - 1)/2 iterations old on average when a failure strikes.
    alike = np.full(rule['experts'], 1 / rule['experts'])
    lost = lost_by_checkpoint(alike, rule['experts_saved'], 'sequential').mean()
    for name in ('QWen-MoE', 'DeepSeek-MoE'):
        share = float(lost) * priced(ROWS[T3, name, MOC][0]).step_s / 600
        count = 0 if share <= rule['lost_token_limit'] else 1
        yield claim('doublings of K', count, doublings, count > 0, name=name, percent=100 * share)
    conditions = [one for row in _rows(T7, MOC) for one in row]
    for mtbf, (least, greatest) in rule['table7_ettr_range'].items():
        ours = [priced(one).ettr_first_order() for one in conditions if one.mtbf == mtbf]
        yield claim('ETTR of MoC', min(ours), least, mtbf=mtbf, end='least')
        yield claim('ETTR of MoC', max(ours), greatest, mtbf=mtbf, end='greatest')


def _skew() -> Iterator[Claim]:
    """Appendix D: S = 1/(1 + alpha E) for a symmetric Dirichlet over E experts."""
    skew = PAPER.text['skew']
    for value, theirs in skew['alpha'].items():
        ours = concentration(float(value), skew['experts'])
        yield claim('alpha', ours, theirs, abs(ours - theirs) <= 0.005 * theirs, skew=value)
    uniform = ROWS[T3, 'DeepSeek-MoE', MOC][-1]
    yield claim('ETTR of MoC without skew', priced(uniform).ettr_first_order())


def _lazarus() -> Iterator[Claim]:
    """Survival of all experts of a layer in Lazarus (arXiv 2407.04656), whose loads are not given.

    The load with the worst overlap has nearly all tokens on one expert: three groups of two nodes
    each.
    """
    given = PAPER.text['lazarus']
    shape = (given['nodes'], given['slots'])
    replicas = [given['least_replicas']] * (given['experts'] - 1)
    replicas.append(given['nodes'] * given['slots'] - sum(replicas))
    overlap = placement.maximum_rank_overlap(replicas, *shape)
    spreads = [placement.spread(replicas, *shape, seed) for seed in range(20)]
    together, *spread = (
        placement.recovery_probability(placed, given['failed_nodes'])
        for placed in (overlap, *spreads)
    )
    for placed, ours in (
        ('with maximum rank overlap', together),
        ('with replicas spread out', mean(spread)),
    ):
        theirs = given['survival'][placed]
        yield claim('survival', ours, theirs, theirs >= ours, placed=placed)


# ---- the report


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
    fits = {row: fit(row, found) for row, found in ROWS.items() if row[2] in DENSE}
    times = {
        name: {setting.name: setting.iteration_s for setting in table.settings}
        for name, table in TABLES.items()
    }
    notes = [(name, *note) for name, table in TABLES.items() for note in table.notes]
    cells = [*all_cells(fits), *table6_cells()]
    return Report(times, cells, [*fits.values()], all_claims(fits), notes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='moevement simulate paper', description=__doc__)
    parser.add_argument('--json', action='store_true', help='print everything as JSON instead')
    report = recompute()
    if parser.parse_args(argv).json:
        print_json(report)
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=_PIPE_WIDTH))
    return 0


def print_report(report: Report, console: Console) -> None:
    """Print tables of computed and printed numbers, claims, constants, notes and counts."""

    def show(
        title: str, columns: str, rows: Iterable[Sequence[str]], judged: Sequence = ()
    ) -> None:
        console.print(
            table(columns.split('|'), rows, [_STYLES.get(one.verdict) for one in judged] or None,
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
    say(console, 'Iteration times, never printed: seconds over percent of the overhead of MoC.')
    for name, times in report.iteration_s.items():
        values = ', '.join(f'{setting} {seconds:.2f} s' for setting, seconds in times.items())
        say(console, f'{name}: {values}')
    say(console, 'Cells that could not be read, or that are odd:')
    for name, cell, note in report.notes:
        say(console, f'  {name}, {cell}: {note}')
    say(console, f'\n{summary(report)}')


def summary(report: Report) -> str:
    def follow(quantity: str) -> str:
        cells: Mapping[str, list[Cell]] = {name: [] for name in (*DENSE, MOC, MOEVEMENT)}
        for one in report.cells:
            if one.quantity == quantity:
                cells[one.system].append(one)
        return ', '.join(f'{system} {_following(found)}' for system, found in cells.items())

    within, cells = (sum(getattr(one, name) for one in report.constants)
                     for name in ('within', 'cells'))  # fmt: skip
    return (
        f'ETTRs within 1.5 points with nothing fitted: {follow("ettr")}; with two constants fitted '
        f'per row: dense systems {within} of {cells}. Recoveries within 10 %: '
        f'{follow("recovery_s")}. Figures and text: {_following(report.claims)}.'
    )


def _following(judged: Iterable[Cell | Claim]) -> str:
    verdicts = [one.verdict for one in judged if one.verdict in _STYLES]
    return f'{verdicts.count(Verdict.FOLLOWS)} of {len(verdicts)}'


def _compared(one: Cell | Claim, form: str, change: str) -> tuple[str, ...]:
    """Their number, ours, the difference, and whether it follows."""
    difference = None if one.ours is None or one.theirs is None else one.ours - one.theirs
    return (_number(one.theirs, form), _number(one.ours, form), _number(difference, change),
            _FOLLOWS[one.verdict])  # fmt: skip


def _number(value: float | None, form: str) -> str:
    return '' if value is None else format(value, form)


if __name__ == '__main__':
    sys.exit(main())
