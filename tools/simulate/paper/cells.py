# SPDX-License-Identifier: Apache-2.0
"""Printed and computed numbers, for every readable cell of Tables 3 and 7.

Inputs are the iteration times, the windows, the intervals and the overheads in seconds. A global
rollback loses half an interval, MoEvement 3/2 of a window (paper, appendix C), MoC one iteration.

Two constants that the paper does not give are fitted per setting and dense system: the additional
slowdown of each iteration and the restart after each failure, one pair for all MTBFs of a row and
never per cell. They minimise the sum of squared differences of the first-order ETTR.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from moevement_ext.plan.strategy.intervals import young_s
from tools.simulate.closed_form import Dense, Sparse, first_order
from tools.simulate.paper import tables
from tools.simulate.paper.tables import Condition

ETTR_TOLERANCE = 0.015
"""1.5 points: the largest difference that the paper reports for its own simulator (Table 4)."""
SCALED_TOLERANCE = 0.1
"""Relative: seconds of recovery and intervals scale with their inputs."""
EXTRA_S = np.arange(0.0, 0.5, 0.002)
RESTART_S = np.arange(0.0, 800.0, 2.0)


class Verdict(StrEnum):
    """Result of the comparison with the paper."""

    FOLLOWS = 'follows'
    DIFFERS = 'differs'
    INPUT = 'input'
    """The number is an input of the others; it cannot be recomputed."""
    NO_INPUTS = 'no inputs'
    """The paper does not give the inputs of the number."""
    FINDING = 'finding'
    """Only computed: the paper does not print the number."""


class Cell(msgspec.Struct, frozen=True):
    """A readable cell of a table."""

    table: str
    setting: str
    system: str
    quantity: str
    mtbf: str
    """Column; empty if the cell is for all columns."""
    theirs: float
    ours: float | None
    """Computed from the paper's own inputs, without a fit."""
    tolerance: float
    verdict: Verdict
    exact: float | None = None
    """Result of the exact renewal form instead of the first-order form."""
    fitted: float | None = None
    """Result with the constants fitted to this setting and system (see `Constants`)."""
    fitted_verdict: Verdict | None = None

    @property
    def difference(self) -> float | None:
        return None if self.ours is None else self.ours - self.theirs


class Constants(msgspec.Struct, frozen=True):
    """Constants fitted to one row of ETTRs."""

    table: str
    setting: str
    system: str
    extra_s: float
    """Seconds added to each iteration, beyond the published overhead."""
    restart_s: float
    """Seconds lost per failure, beyond the repeated work."""
    cells: int
    within: int
    """Number of cells within ETTR_TOLERANCE."""


Fits = Mapping[tuple[str, str, str], Constants]
"""Constants by table, setting and system."""


def judge(ours: float, theirs: float, tolerance: float) -> Verdict:
    """FOLLOWS within `tolerance` (absolute), else DIFFERS."""
    within = abs(ours - theirs) <= tolerance + 1e-9
    return Verdict.FOLLOWS if within else Verdict.DIFFERS


def fit(row: Sequence[Condition]) -> Constants:
    """Fit constants to the readable cells of a row of a dense system, on a grid of 2 ms by 2 s."""
    known = [condition for condition in row if condition.ettr is not None]
    iteration_s, interval, overhead_s, mtbf_s, theirs = (
        np.array(values)
        for values in zip(
            *((one.setting.iteration_s, one.interval, one.overhead_s, one.mtbf_s, one.ettr)
              for one in known), strict=True)
    )  # fmt: skip
    ettr = first_order(
        iteration_s,
        overhead_s + EXTRA_S[:, None, None],
        interval * iteration_s / 2 + RESTART_S[:, None],
        mtbf_s,
    )
    off = np.abs(ettr - theirs)
    extra, restart = np.unravel_index((off**2).sum(axis=-1).argmin(), off.shape[:2])
    pair = round(float(EXTRA_S[extra]), 3), float(RESTART_S[restart])
    within = int((off[extra, restart] <= ETTR_TOLERANCE).sum())
    return Constants(*known[0].row, *pair, len(known), within)


def fit_all() -> list[Constants]:
    """Fit constants for every setting of Tables 3 and 7 and every dense system."""
    return [fit(row) for row in tables.rows(systems=tables.DENSE)]


def all_cells(fits: Fits) -> list[Cell]:
    return [cell for row in tables.rows() for cell in _row_cells(row, fits.get(row[0].row))]


def priced(condition: Condition, fitted: Constants | None = None) -> Dense | Sparse:
    """The system under a condition of the paper, with the fitted constants if given."""
    setting, overhead_s, mtbf_s = condition.setting, condition.overhead_s, condition.mtbf_s
    if condition.system == tables.MOEVEMENT:
        return Sparse(setting.iteration_s, setting.window, overhead_s=overhead_s, mtbf_s=mtbf_s)
    extra_s, restart_s = (fitted.extra_s, fitted.restart_s) if fitted else (0.0, 0.0)
    overhead_s += extra_s
    return Dense(setting.iteration_s, condition.interval, overhead_s, 0.0, restart_s, mtbf_s)


def _row_cells(row: list[Condition], fitted: Constants | None) -> Iterator[Cell]:
    printed = row[0].setting.systems[row[0].system]
    alone = len(printed.interval) == 1
    for condition in row[: len(printed.interval)]:
        yield _interval_cell(condition, '' if alone else condition.mtbf)
    alone = len(printed.overhead_s) == 1
    for index, condition in enumerate(row[: len(printed.overhead_s)]):
        percent = tables.value_at(printed.overhead_percent, index)
        yield from _overhead_cells(condition, '' if alone else condition.mtbf, percent)
    yield from (_recovery_cell(one, fitted) for one in row if one.recovery_s is not None)
    yield from (_ettr_cell(one, fitted) for one in row if one.ettr is not None)


def _interval_cell(condition: Condition, mtbf: str) -> Cell:
    """Compare Gemini's interval, the optimum for its costs, with Young's."""
    theirs = condition.interval
    if condition.system == tables.GEMINI:
        ours, tolerance = young_interval(condition), SCALED_TOLERANCE * theirs
        verdict = judge(ours, theirs, tolerance)
        return Cell(*condition.row, 'interval', mtbf, theirs, ours, tolerance, verdict)
    # CheckFreq's interval needs a disk bandwidth that is not given; 1 is a definition.
    verdict = Verdict.NO_INPUTS if condition.system == tables.CHECKFREQ else Verdict.INPUT
    return Cell(*condition.row, 'interval', mtbf, theirs, None, 0.0, verdict)


def young_interval(condition: Condition) -> float:
    """sqrt(2 c M) / T iterations (Young 1974), a checkpoint costing its interval's overhead c."""
    cost_s = condition.overhead_s * condition.interval
    return young_s(cost_s, condition.mtbf_s) / condition.setting.iteration_s


def _overhead_cells(condition: Condition, mtbf: str, percent: float | None) -> Iterator[Cell]:
    seconds, iteration_s = condition.overhead_s, condition.setting.iteration_s
    yield Cell(*condition.row, 'overhead_s', mtbf, seconds, None, 0.0, Verdict.INPUT)
    if percent is None:
        return
    ours = 100 * seconds / iteration_s
    tolerance = 0.5 + 100 * 0.005 / iteration_s  # both numbers are rounded
    verdict = judge(ours, percent, tolerance)
    if condition.system == tables.MOC:
        verdict = Verdict.INPUT  # the iteration times are derived from this cell
    yield Cell(*condition.row, 'overhead_percent', mtbf, percent, ours, tolerance, verdict)


def _recovery_cell(condition: Condition, fitted: Constants | None) -> Cell:
    theirs, failures = condition.recovery_s, condition.failures
    assert theirs is not None
    per_failure_s = priced(condition).expected_recovery_s()
    if condition.system == tables.MOC:
        per_failure_s = condition.setting.iteration_s
    with_fit = failures * priced(condition, fitted).expected_recovery_s() if fitted else None
    tolerance = SCALED_TOLERANCE * theirs
    return _judged_cell(condition, 'recovery_s', theirs, failures * per_failure_s, tolerance,
                        fitted=with_fit)  # fmt: skip


def _ettr_cell(condition: Condition, fitted: Constants | None) -> Cell:
    theirs, system = condition.ettr, priced(condition)
    assert theirs is not None
    with_fit = priced(condition, fitted).ettr_first_order() if fitted else None
    return _judged_cell(condition, 'ettr', theirs, system.ettr_first_order(), ETTR_TOLERANCE,
                        exact=system.ettr_exact(), fitted=with_fit)  # fmt: skip


def _judged_cell(
    condition: Condition, quantity: str, theirs: float, ours: float, tolerance: float,
    exact: float | None = None, fitted: float | None = None,
) -> Cell:  # fmt: skip
    verdict = judge(ours, theirs, tolerance)
    with_fit = None if fitted is None else judge(fitted, theirs, tolerance)
    return Cell(*condition.row, quantity, condition.mtbf, theirs, ours, tolerance, verdict, exact,
                fitted, with_fit)  # fmt: skip
