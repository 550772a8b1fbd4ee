# SPDX-License-Identifier: Apache-2.0
"""Which bandwidth the paper's windows imply.

Algorithm 1 with equal operators needs W = ceil((A - F) / (b - F)) slots for a budget of b bytes per
parameter and iteration, so a window names a range of budgets, and with the parameters and the
iteration time a range of bandwidths over which the whole model goes.
"""

import math
from typing import NamedTuple

from tools.simulate.paper import tables

COPY_BYTES_PER_S = 25e9
"""To the host memory of one A100 (PCIe 4, 25 of nominally 32 GB/s)."""


class Implied(NamedTuple):
    """Bandwidth in bytes/s, for the bytes of the whole model, that gives the printed window."""

    table: str
    setting: tables.Setting
    least: float
    below: float


def implied_bandwidths() -> list[Implied]:
    """One range per setting of Tables 3 and 7."""
    found = []
    for name, table in tables.ettr_tables().items():
        for setting in table.settings:
            step = setting.full_bytes - setting.light_bytes
            rate = setting.params_e9 * 1e9 / setting.iteration_s
            least = (setting.light_bytes + step / setting.window) * rate
            below = (setting.light_bytes + step / (setting.window - 1)) * rate
            found.append(Implied(name, setting, least, below))
    return found


def best_bandwidth(ranges: list[Implied]) -> tuple[float, int]:
    """The one bandwidth that gives most of the windows (fitted), and how many."""
    met = {
        one.least: sum(other.least <= one.least < other.below for other in ranges) for one in ranges
    }
    best = max(met, key=lambda rate: met[rate])
    return best, met[best]


def window_as_printed(setting: tables.Setting, bandwidth: float) -> int | None:
    """W of Algorithm 1 at a bandwidth for the whole model; None where no window is long enough."""
    budget = bandwidth * setting.iteration_s / (setting.params_e9 * 1e9)
    if budget <= setting.light_bytes:
        return None
    step = setting.full_bytes - setting.light_bytes
    return max(1, math.ceil(step / (budget - setting.light_bytes) - 1e-9))


def dense_capture_share(table: tables.Table, setting: tables.Setting) -> float:
    """Share of an iteration that a GPU needs to copy its part of the full state to the host.

    Below 1, W = 1 fits: the state is sharded evenly, and each GPU has a link of its own.
    """
    own_bytes = setting.full_bytes * setting.params_e9 * 1e9 / table.gpus
    return own_bytes / COPY_BYTES_PER_S / setting.iteration_s
