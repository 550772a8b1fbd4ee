# SPDX-License-Identifier: Apache-2.0
"""The trace of failures that all rows of a comparison get: the same moments, the same victims."""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tools.lab.job import Kind
from tools.simulate.failures import Trace

KINDS = (Kind.KILL, Kind.NODE)
# Part of the mean gap between two faults that always lies between them.
_LEAST_GAP = 0.5


class PlannedFault(NamedTuple):
    """A fault of the trace."""

    at_s: float
    """Seconds since the first iteration was logged."""
    kind: Kind
    """One of `KINDS`."""
    rank: int
    """The killed rank; for a node, one of its ranks."""


def draw(seed: int, count: int, begin_s: float, end_s: float, ranks: int) -> list[PlannedFault]:
    """Draw faults at random moments, kills and node losses in turn."""
    drawn = random.Random(seed)
    gap = _LEAST_GAP * (end_s - begin_s) / count
    free = end_s - begin_s - gap * (count - 1)
    moments = sorted(drawn.uniform(0, free) for _ in range(count))
    return [
        PlannedFault(
            round(begin_s + moment + number * gap, 3),
            KINDS[number % len(KINDS)],
            drawn.randrange(ranks),
        )
        for number, moment in enumerate(moments)
    ]


def for_simulator(faults_s: Sequence[float], nodes: Sequence[int], length_s: float) -> Trace:
    """The process of the simulator with faults at these seconds, on these nodes, until the end."""
    return Trace(
        np.array(faults_s),
        np.array(nodes, dtype=int),
        np.full(len(faults_s), math.inf),
        length_s,
    )
