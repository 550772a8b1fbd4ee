# SPDX-License-Identifier: Apache-2.0
"""Two constants that the paper does not give, fitted per setting and dense system.

The extra slowdown of each iteration and the restart after each failure are one pair for all MTBFs
of a row, never one per cell. They minimise the sum of squared differences of the first-order ETTR.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from tools.simulate.paper import tables

EXTRA_S = np.arange(0.0, 0.5, 0.002)
RESTART_S = np.arange(0.0, 800.0, 2.0)
ETTR_TOLERANCE = 0.015
"""1.5 points: the largest difference that the paper reports for its own simulator (Table 4)."""


class Constants(msgspec.Struct, frozen=True):
    """What was fitted to one row of ETTRs."""

    table: str
    setting: str
    system: str
    extra_s: float
    """Seconds added to each iteration, beyond the published overhead."""
    restart_s: float
    """Seconds lost per failure, beyond the work that is done again."""
    cells: int
    within: int
    """Cells within ETTR_TOLERANCE."""


def first_order(
    iteration_s: np.ndarray, overhead_s: np.ndarray, recovery_s: np.ndarray, mtbf_s: np.ndarray
) -> np.ndarray:
    """1/(1 + o/T) x 1/(1 + E[R]/M) of arrays that broadcast (paper, appendix C)."""
    ettr: np.ndarray = 1 / (1 + overhead_s / iteration_s) / (1 + recovery_s / mtbf_s)
    return ettr


def fit(table: str, row: Sequence[tables.Condition]) -> Constants:
    """Constants for the readable cells of a row of a dense system, from a grid of 2 ms by 2 s."""
    known = [condition for condition in row if condition.ettr is not None]
    setting = known[0].setting
    iteration_s = np.full(len(known), setting.iteration_s)
    interval = np.array([condition.interval for condition in known])
    overhead_s = np.array([condition.overhead_s for condition in known])
    ettr = first_order(
        iteration_s,
        overhead_s + EXTRA_S[:, None, None],
        interval * iteration_s / 2 + RESTART_S[:, None],
        np.array([condition.mtbf_s for condition in known]),
    )
    off = np.abs(ettr - np.array([condition.ettr for condition in known]))
    extra, restart = np.unravel_index((off**2).sum(axis=-1).argmin(), off.shape[:2])
    return Constants(
        table,
        setting.name,
        known[0].system,
        round(float(EXTRA_S[extra]), 3),
        float(RESTART_S[restart]),
        len(known),
        int((off[extra, restart] <= ETTR_TOLERANCE).sum()),
    )


def fit_all() -> list[Constants]:
    """For every setting of Tables 3 and 7 and every dense system."""
    return [
        fit(name, list(tables.conditions(table, setting, system)))
        for name, table in tables.ettr_tables().items()
        for setting in table.settings
        for system in tables.DENSE
    ]
