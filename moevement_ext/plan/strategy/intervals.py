# SPDX-License-Identifier: Apache-2.0
"""Optimal seconds between checkpoints, from the stall of one and the mean time to failure."""

import math


def young_s(stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 c M): seconds from one checkpoint to the next (Young, 1974)."""
    return math.sqrt(2 * stall_s * mtbf_s) if stall_s else 0.0


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds from one checkpoint to the next in Daly's higher-order form (Daly, 2006).

    sqrt(2 c M) (1 + (c/2M)^(1/2) / 3 + (c/2M) / 9) - c below c = 2 M, else M.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    if math.isinf(mtbf_s):
        return young_s(stall_s, mtbf_s)
    part = stall_s / (2 * mtbf_s)
    return young_s(stall_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - stall_s
