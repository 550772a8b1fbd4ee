# SPDX-License-Identifier: Apache-2.0
"""Every readable cell of Tables 3 and 7, recomputed from the others.

Inputs are the iteration times, the windows, the intervals and the overheads in seconds. A global
rollback loses half an interval, MoEvement 3/2 of a window (paper, appendix C), MoC an iteration.
"""

import math
from collections.abc import Iterator, Mapping

from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.paper import tables
from tools.simulate.paper.compare import Cell, Verdict, judge
from tools.simulate.paper.fit import ETTR_TOLERANCE, Constants

INTERVAL_TOLERANCE = 0.1
RECOVERY_TOLERANCE = 0.1
"""Relative, as seconds and intervals scale with what they are computed from."""

Fits = Mapping[tuple[str, str, str], Constants]
"""By table, setting and system."""


def all_cells(fits: Fits) -> list[Cell]:
    """Cells in the order of the tables."""
    return [
        cell
        for name, table in tables.ettr_tables().items()
        for setting in table.settings
        for system in setting.systems
        for cell in _row_cells(name, table, setting, system, fits)
    ]


def priced(condition: tables.Condition, fitted: Constants | None = None) -> Dense | Sparse:
    """The system under a condition of the paper, with the fitted constants if there are some."""
    setting = condition.setting
    if condition.system == tables.MOEVEMENT:
        return Sparse(
            setting.iteration_s,
            setting.window,
            overhead_s=condition.overhead_s,
            mtbf_s=condition.mtbf_s,
        )
    extra_s, restart_s = (fitted.extra_s, fitted.restart_s) if fitted else (0.0, 0.0)
    return Dense(
        setting.iteration_s,
        condition.interval,
        overhead_s=condition.overhead_s + extra_s,
        restart_s=restart_s,
        mtbf_s=condition.mtbf_s,
    )


def _row_cells(
    name: str, table: tables.Table, setting: tables.Setting, system: str, fits: Fits
) -> Iterator[Cell]:
    row = list(tables.conditions(table, setting, system))
    fitted = fits.get((name, setting.name, system))
    yield from _interval_cells(name, row, setting.systems[system].interval)
    yield from _overhead_cells(name, row, setting.systems[system])
    for condition in row:
        if condition.recovery_s is not None:
            yield _recovery_cell(name, condition, fitted)
    for condition in row:
        if condition.ettr is not None:
            yield _ettr_cell(name, condition, fitted)


def _interval_cells(
    name: str, row: list[tables.Condition], printed: list[int | None]
) -> Iterator[Cell]:
    """Gemini's is the best for its costs, so it is compared with Young's."""
    for condition in row[: len(printed)]:
        mtbf = condition.mtbf if len(printed) > 1 else ''
        theirs = condition.interval
        if condition.system == tables.GEMINI:
            ours = young_interval(condition)
            tolerance = INTERVAL_TOLERANCE * theirs
            verdict = judge(ours, theirs, tolerance)
            yield _cell(name, condition, 'interval', mtbf, theirs, ours, tolerance, verdict)
        else:
            # CheckFreq's follows from a disk bandwidth that is not given, 1 is a definition.
            missing = condition.system == tables.CHECKFREQ
            verdict = Verdict.NO_INPUTS if missing else Verdict.INPUT
            yield _cell(name, condition, 'interval', mtbf, theirs, None, 0.0, verdict)


def young_interval(condition: tables.Condition) -> float:
    """sqrt(2 c M) / T iterations (Young 1974), a checkpoint costing its interval's overhead c."""
    cost_s = condition.overhead_s * condition.interval
    return math.sqrt(2 * cost_s * condition.mtbf_s) / condition.setting.iteration_s


def _overhead_cells(
    name: str, row: list[tables.Condition], printed: tables.SystemRows
) -> Iterator[Cell]:
    for index, condition in enumerate(row[: len(printed.overhead_s)]):
        mtbf = condition.mtbf if len(printed.overhead_s) > 1 else ''
        seconds = condition.overhead_s
        yield _cell(name, condition, 'overhead_s', mtbf, seconds, None, 0.0, Verdict.INPUT)
        percent = tables.value_at(printed.overhead_percent, index)
        if percent is None:
            continue
        iteration_s = condition.setting.iteration_s
        ours = 100 * seconds / iteration_s
        tolerance = 0.5 + 100 * 0.005 / iteration_s  # both are rounded
        verdict = judge(ours, percent, tolerance)
        if condition.system == tables.MOC:
            verdict = Verdict.INPUT  # the iteration times come from here
        yield _cell(name, condition, 'overhead_percent', mtbf, percent, ours, tolerance, verdict)


def _recovery_cell(name: str, condition: tables.Condition, fitted: Constants | None) -> Cell:
    theirs = condition.recovery_s
    assert theirs is not None
    tolerance = RECOVERY_TOLERANCE * theirs
    per_failure_s = (
        condition.setting.iteration_s
        if condition.system == tables.MOC
        else priced(condition).expected_recovery_s()
    )
    ours = condition.failures * per_failure_s
    with_fit = (
        condition.failures * priced(condition, fitted).expected_recovery_s() if fitted else None
    )
    return Cell(
        name,
        condition.setting.name,
        condition.system,
        'recovery_s',
        condition.mtbf,
        theirs,
        ours,
        tolerance,
        judge(ours, theirs, tolerance),
        fitted=with_fit,
        fitted_verdict=None if with_fit is None else judge(with_fit, theirs, tolerance),
    )


def _ettr_cell(name: str, condition: tables.Condition, fitted: Constants | None) -> Cell:
    theirs = condition.ettr
    assert theirs is not None
    system = priced(condition)
    ours = system.ettr_first_order()
    with_fit = priced(condition, fitted).ettr_first_order() if fitted else None
    return Cell(
        name,
        condition.setting.name,
        condition.system,
        'ettr',
        condition.mtbf,
        theirs,
        ours,
        ETTR_TOLERANCE,
        judge(ours, theirs, ETTR_TOLERANCE),
        exact=system.ettr_exact(),
        fitted=with_fit,
        fitted_verdict=None if with_fit is None else judge(with_fit, theirs, ETTR_TOLERANCE),
    )


def _cell(
    table: str,
    condition: tables.Condition,
    quantity: str,
    mtbf: str,
    theirs: float,
    ours: float | None,
    tolerance: float,
    verdict: Verdict,
) -> Cell:
    setting = condition.setting.name
    return Cell(table, setting, condition.system, quantity, mtbf, theirs, ours, tolerance, verdict)
