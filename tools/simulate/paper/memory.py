# SPDX-License-Identifier: Apache-2.0
"""Table 6 and the sizes of captures, per parameter.

A window of W slots with equal operators of A bytes in full and F light stores A + (W-1)/2 F bytes
per parameter: everything in full once, and light what is still to come, half of it on average.
"""

from collections.abc import Iterator

import numpy as np

from tools.simulate.paper import tables
from tools.simulate.paper.compare import Cell, Verdict, judge

DENSE_BYTES = 12
"""fp32 master weight and two moments."""
LIGHT_BYTES = 2
"""bf16 compute weight."""
GENERATIONS = 2
"""One kept, one under way."""
FITTED_GEMINI_BYTES = 26
"""Bytes per parameter, fitted to all rows of Gemini; 2 more than two generations."""
RELATIVE_TOLERANCE = 0.02


def slot_bytes(window: int, full: float, light: float) -> np.ndarray:
    """Bytes per parameter of each slot when operators are equal, float64 (window,)."""
    later = np.arange(window - 1, -1, -1)
    sizes: np.ndarray = (full + light * later) / window
    return sizes


def table6_cells() -> Iterator[Cell]:
    """Rows of Table 6 from parameters and windows; total and percentage from their parts."""
    for row in tables.memory_table().rows:
        window_bytes = GENERATIONS * float(slot_bytes(row.window, DENSE_BYTES, LIGHT_BYTES).sum())
        fitted = FITTED_GEMINI_BYTES * row.params_e9
        tolerance = RELATIVE_TOLERANCE * row.gemini_gb
        yield Cell(
            'Table 6',
            row.name,
            tables.GEMINI,
            'host_gb',
            '',
            row.gemini_gb,
            ours := GENERATIONS * DENSE_BYTES * row.params_e9,
            tolerance,
            judge(ours, row.gemini_gb, tolerance),
            fitted=fitted,
            fitted_verdict=judge(fitted, row.gemini_gb, tolerance),
        )
        yield from (
            Cell('Table 6', row.name, tables.MOEVEMENT, *rest)
            for rest in (
                _close('windows_gb', row.windows_gb, window_bytes * row.params_e9),
                ('logs_gb', '', row.logs_gb, None, 0.0, Verdict.NO_INPUTS),
                _close('total_gb', row.total_gb, row.windows_gb + row.logs_gb, 0.1),
                _close('more_percent', row.more_percent, _more_percent(row), 0.15),
            )
        )


def _more_percent(row: tables.MemoryRow) -> float:
    return 100 * (row.total_gb / row.gemini_gb - 1)


def _close(
    quantity: str, theirs: float, ours: float, tolerance: float | None = None
) -> tuple[str, str, float, float, float, Verdict]:
    """A cell that is for all MTBFs; `tolerance` is absolute, 2 % where there is none."""
    tolerance = RELATIVE_TOLERANCE * theirs if tolerance is None else tolerance
    return quantity, '', theirs, ours, tolerance, judge(ours, theirs, tolerance)
