# SPDX-License-Identifier: Apache-2.0
"""Failures that really happened, from a CSV file with the columns time, node, event.

    time,node,event
    0,node3,failure
    5400,node3,repair
    7260,node1,failure

Seconds from the beginning on, or those of a clock, in any order; names of nodes; `failure` or
`repair`. A failure of a node that is down already counts, too; a repair ends all of them, after
which the node can serve as a spare.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.simulate import fields
from tools.simulate.failures import FailureTimes, check_size

COLUMNS = ('time', 'node', 'event')
EVENTS = ('failure', 'repair')


class TraceError(ValueError):
    """A trace file that cannot be used; the message names file, line and rule."""


@dataclass(frozen=True)
class Trace:
    """Failures of one real history.

    Simulated histories begin at random moments of it and go on at its beginning after its end; the
    first one begins where the trace does.
    """

    times: np.ndarray
    """Seconds since the start of the trace, ascending, [failures]."""
    nodes: np.ndarray
    """Index of the node that failed, in order of the nodes' names, [failures]."""
    repair_s: np.ndarray
    """Seconds until it was repaired; inf if the trace does not say, [failures]."""
    length_s: float
    """Seconds of the trace; above the last failure's."""
    names: tuple[str, ...] = ()
    """Names of the nodes."""

    def __post_init__(self) -> None:
        fields.positive('length_s', self.length_s)
        inside = len(self.times) == 0 or float(self.times[-1]) < self.length_s
        fields.require(inside, 'length_s', self.length_s, 'must lie after the last failure')

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures; inf if there are none."""
        return self.length_s / len(self.times) if len(self.times) else math.inf

    def until(
        self, rng: np.random.Generator, histories: int, horizon_s: float, nodes: int
    ) -> FailureTimes:
        """All failures before `horizon_s`; raises FieldError if `nodes` are too few for them."""
        most = int(self.nodes.max(initial=-1)) + 1
        fields.require(nodes >= most, 'nodes', nodes, f'the trace has {most} nodes')
        rounds = math.ceil(horizon_s / self.length_s) + 1
        check_size(histories * rounds * len(self.times))
        begin = rng.random((histories, 1)) * self.length_s
        begin[0] = 0
        turns = np.repeat(np.arange(rounds) * self.length_s, len(self.times))
        times = turns + np.tile(self.times, rounds) - begin
        inside = (times >= 0) & (times < horizon_s)
        shape = times.shape
        order = np.argsort(~inside, axis=1, kind='stable')[:, : int(inside.sum(axis=1).max())]
        times = np.where(inside, times, math.inf)

        def pick(values: np.ndarray) -> np.ndarray:
            everything = np.broadcast_to(np.tile(values, rounds), shape)
            return np.take_along_axis(everything, order, axis=1)

        ordered = np.take_along_axis(times, order, axis=1)
        return FailureTimes(ordered, pick(self.nodes), pick(self.repair_s))


def read_trace(path: Path) -> Trace:
    """Read a CSV file as the module's docstring describes.

    Raises:
        TraceError: the file is missing or not such a file; names file, line and rule.
    """
    try:
        with path.open(newline='', encoding='utf-8') as file:
            events = _events(csv.DictReader(file), path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f'{path}: cannot be read: {error}') from error
    names = tuple(sorted({node for _, node, _ in events}))
    index = {name: number for number, name in enumerate(names)}
    start = _beginning(events[0][0], events[-1][0])
    down: dict[str, list[int]] = {}
    times: list[float] = []
    nodes: list[int] = []
    repairs: list[float] = []
    for time, node, event in events:
        if event == 'failure':
            down.setdefault(node, []).append(len(times))
            times.append(time - start)
            nodes.append(index[node])
            repairs.append(math.inf)
        else:
            for failed in down.pop(node, []):
                repairs[failed] = time - start - times[failed]
    # The mean gap after the last event keeps the rate when the trace is run through repeatedly.
    gap = (events[-1][0] - events[0][0]) / (len(events) - 1)
    length = events[-1][0] - start + gap
    return Trace(np.array(times), np.array(nodes, dtype=int), np.array(repairs), length, names)


def _beginning(first: float, last: float) -> float:
    """Zero, so that what was before the first event counts; the first event by a clock's times."""
    return 0.0 if 0 <= first < last - first else first


def _events(rows: csv.DictReader[str], path: Path) -> list[tuple[float, str, str]]:
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise TraceError(
            f'{path}: no column {", ".join(missing)}; the first line must name the columns '
            f'{",".join(COLUMNS)}'
        )
    events = []
    for row in rows:
        where = f'{path}:{rows.line_num}'
        try:
            time = float(row['time'] or '')
        except ValueError:
            time = math.nan
        if not math.isfinite(time):
            raise TraceError(f'{where}: time is {row["time"]!r}; give seconds')
        if not row['node']:
            raise TraceError(f'{where}: node is empty; give its name')
        if row['event'] not in EVENTS:
            raise TraceError(f'{where}: event is {row["event"]!r}; one of {", ".join(EVENTS)}')
        events.append((time, row['node'], row['event']))
    if not any(event == 'failure' for _, _, event in events):
        raise TraceError(f'{path}: no failure in it; nothing to simulate')
    if len({time for time, _, _ in events}) == 1:
        raise TraceError(f'{path}: all events are at one moment; add a later one, a repair will do')
    return sorted(events, key=lambda event: event[0])
