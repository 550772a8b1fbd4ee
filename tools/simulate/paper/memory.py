# SPDX-License-Identifier: Apache-2.0
"""Table 6, the sizes of captures per parameter, and the bandwidths that the windows imply.

A window of W slots with equal operators of A bytes in full and F weights stores A + (W-1)/2 F bytes
per parameter: every operator in full once, and weights until then, in half of the slots on average.

Algorithm 1 with equal operators needs W = ceil((A - F) / (b - F)) slots for a budget of b bytes per
parameter and iteration. So a window implies a range of budgets, and with the parameters and the
iteration time a range of bandwidths for the whole model.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tools.simulate.paper import tables
from tools.simulate.paper.cells import Cell, Verdict, judge

DENSE_BYTES = 12
"""fp32 master weight and two moments."""
WEIGHT_BYTES = 2
"""bf16 compute weight."""
GENERATIONS = 2
"""One kept window, one under way."""
FITTED_GEMINI_BYTES = 26
"""Bytes per parameter, fitted to all rows of Gemini; 2 more than two generations."""
RELATIVE_TOLERANCE = 0.02
COPY_BYTES_PER_S = 25e9
"""Rate to host memory of one A100 (PCIe 4, 25 of nominally 32 GB/s)."""


def slot_bytes(window: int, full: float, weights: float) -> np.ndarray:
    """Bytes per parameter of each slot with equal operators, float64 (window,)."""
    later = np.arange(window - 1, -1, -1)
    sizes: np.ndarray = (full + weights * later) / window
    return sizes


def table6_cells() -> Iterator[Cell]:
    """Rows of Table 6, from parameters and windows; totals and percentages from their parts."""
    for row in tables.memory_table():
        window_bytes = GENERATIONS * float(slot_bytes(row.window, DENSE_BYTES, WEIGHT_BYTES).sum())
        theirs, ours = row.gemini_gb, GENERATIONS * DENSE_BYTES * row.params_e9
        fitted, tolerance = FITTED_GEMINI_BYTES * row.params_e9, RELATIVE_TOLERANCE * theirs
        verdicts = (judge(one, theirs, tolerance) for one in (ours, fitted))
        yield Cell('Table 6', row.name, tables.GEMINI, 'host_gb', '', theirs, ours, tolerance,
                   next(verdicts), fitted=fitted, fitted_verdict=next(verdicts))  # fmt: skip
        more_percent = 100 * (row.total_gb / row.gemini_gb - 1)
        windows_gb, off = row.windows_gb, RELATIVE_TOLERANCE * row.windows_gb
        for quantity, printed, computed, within in (
            ('windows_gb', windows_gb, window_bytes * row.params_e9, off),
            ('logs_gb', row.logs_gb, None, 0.0),
            ('total_gb', row.total_gb, windows_gb + row.logs_gb, 0.1),
            ('more_percent', row.more_percent, more_percent, 0.15),
        ):
            verdict = Verdict.NO_INPUTS
            if computed is not None:
                verdict = judge(computed, printed, within)
            name = 'Table 6', row.name, tables.MOEVEMENT, quantity, ''
            yield Cell(*name, printed, computed, within, verdict)


class Implied(NamedTuple):
    """Bandwidth in bytes/s, for the bytes of the whole model, that implies the printed window."""

    table: str
    setting: tables.Setting
    least: float
    below: float


def implied_bandwidths() -> list[Implied]:
    """One range per setting of Tables 3 and 7."""
    found = []
    for name, table in tables.ettr_tables().items():
        for setting in table.settings:
            step = setting.full_bytes - setting.weight_bytes
            rate = setting.params_e9 * 1e9 / setting.iteration_s
            least, below = (
                (setting.weight_bytes + step / slots) * rate
                for slots in (setting.window, setting.window - 1)
            )
            found.append(Implied(name, setting, least, below))
    return found


def best_bandwidth(ranges: list[Implied]) -> tuple[float, int]:
    """The bandwidth that implies most of the windows (fitted), and their number."""
    met = {
        one.least: sum(other.least <= one.least < other.below for other in ranges) for one in ranges
    }
    best = max(met, key=lambda rate: met[rate])
    return best, met[best]


def window_as_printed(setting: tables.Setting, bandwidth: float) -> int | None:
    """W of Algorithm 1 at a bandwidth for the whole model; None if every window is too short."""
    budget = bandwidth * setting.iteration_s / (setting.params_e9 * 1e9)
    if budget <= setting.weight_bytes:
        return None
    step = setting.full_bytes - setting.weight_bytes
    return max(1, math.ceil(step / (budget - setting.weight_bytes) - 1e-9))


def dense_capture_share(table: tables.Table, setting: tables.Setting) -> float:
    """Share of an iteration in which a GPU copies its part of the full state to the host.

    Below 1, W = 1 suffices: the state is sharded evenly, and each GPU has its own link.
    """
    own_bytes = setting.full_bytes * setting.params_e9 * 1e9 / table.gpus
    return own_bytes / COPY_BYTES_PER_S / setting.iteration_s
