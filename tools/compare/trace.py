# SPDX-License-Identifier: Apache-2.0
"""The trace of failures that all rows of a comparison get: the same moments, the same victims."""

import csv
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.lab.figures import replacing
from tools.lab.job import Kind
from tools.simulate.failures import Trace

KINDS = (Kind.KILL, Kind.NODE)
COLUMNS = ('time', 'rank', 'event')
# Part of the mean gap between two faults that always lies between them.
_LEAST_GAP = 0.5


class TraceProblem(ValueError):
    """A trace file is unusable; the message names file, line and rule."""


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


def write(target: Path, faults: Sequence[PlannedFault]) -> None:
    with replacing(target) as partial, partial.open('w', newline='', encoding='utf-8') as file:
        rows = csv.writer(file, lineterminator='\n')
        rows.writerow(COLUMNS)
        rows.writerows((f'{fault.at_s:g}', fault.rank, fault.kind) for fault in faults)


def read(path: Path, ranks: int) -> list[PlannedFault]:
    """Read a trace as `write` writes it, in any order.

    Raises:
        TraceProblem: the file is missing or malformed.
    """
    try:
        with path.open(newline='', encoding='utf-8') as file:
            rows = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
                raise TraceProblem(
                    f'{path}: no column {", ".join(missing)}; the first line must be '
                    f'{",".join(COLUMNS)}'
                )
            faults = [_fault(row, f'{path}:{rows.line_num}', ranks) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceProblem(f'{path}: cannot be read: {error}') from error
    if not faults:
        raise TraceProblem(f'{path}: no fault in it; add a line')
    return sorted(faults)


def _fault(row: dict[str, str], where: str, ranks: int) -> PlannedFault:
    try:
        at_s = float(row['time'])
    except (TypeError, ValueError):
        at_s = math.nan
    if not 0 < at_s < math.inf:
        raise TraceProblem(f'{where}: time is {row["time"]!r}; give seconds above 0')
    if row['event'] not in KINDS:
        raise TraceProblem(f'{where}: event is {row["event"]!r}; one of {", ".join(KINDS)}')
    if not (row['rank'] or '').isdecimal() or int(row['rank']) >= ranks:
        raise TraceProblem(f'{where}: rank is {row["rank"]!r}; give one below {ranks}')
    return PlannedFault(at_s, Kind(row['event']), int(row['rank']))


def for_simulator(faults_s: Sequence[float], nodes: Sequence[int], length_s: float) -> Trace:
    """The process of the simulator with faults at these seconds, on these nodes, until the end."""
    return Trace(
        np.array(faults_s),
        np.array(nodes, dtype=int),
        np.full(len(faults_s), math.inf),
        length_s,
    )
