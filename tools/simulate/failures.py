# SPDX-License-Identifier: Apache-2.0
"""Times and nodes of failures: Poisson, Weibull, correlated, or from a trace.

A process draws many independent histories at once. Renewal processes (independent gaps) can draw a
given number of failures; all processes can draw up to a horizon.

A trace is a CSV file with the columns time, node, event, as docs/assets/simulate-trace.csv.
Times are seconds from the start or from a clock, in any order; names of nodes are free; events are
`failure` and `repair`. A failure of a node that is already down counts, too; a repair ends all
failures of its node, which can then serve as a spare.
"""

import csv
import math
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta

from ..model import fields
from ..model.fields import Checked, NotNegative, Positive, PositiveOrInfinite

MOST_FAILURES = 20_000_000
"""Limit of failures in one simulation, over all histories, given by memory."""
COLUMNS = ('time', 'node', 'event')
EVENTS = ('failure', 'repair')
LEAST_SHAPE = 0.1
"""Smallest shape of Weibull gaps: below it, a few gaps have nearly all of the time."""
Shape = Annotated[float, Meta(ge=LEAST_SHAPE, le=math.nextafter(math.inf, 0),
                              description=f'give {LEAST_SHAPE:g} or more')]  # fmt: skip
Chance = Annotated[
    float, Meta(ge=0, le=math.nextafter(1, 0), description='give a number from 0 to below 1')
]


class FailureTimes(NamedTuple):
    """Failures of several histories; arrays of shape [histories, failures]."""

    times: np.ndarray
    """Seconds since the start, ascending along a row; inf after the last failure of a history."""
    nodes: np.ndarray
    """The failed node, 0 .. nodes - 1."""
    repair_s: np.ndarray | None = None
    """Seconds until the node can be a spare; None if not given (a trace gives it)."""


class Process(Protocol):
    """A random process of failures."""

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures."""

    def until(
        self, rng: np.random.Generator, histories: int, horizon_s: float, nodes: int
    ) -> FailureTimes:
        """All failures before `horizon_s`."""


class Renewal(Checked, frozen=True):
    """Independent gaps of mean `mtbf_s`, Weibull with `shape`; 1 is the Poisson process.

    A shape below 1 produces bunches (a failure is likely soon after another), a shape above 1
    regular failures. All nodes are equally likely to fail.
    """

    mtbf_s: PositiveOrInfinite
    shape: Shape = 1.0

    def gaps(self, rng: np.random.Generator, histories: int, count: int) -> np.ndarray:
        check_size(histories * count)
        if self.shape == 1:
            return rng.exponential(self.mtbf_s, (histories, count))
        scale = self.mtbf_s / math.gamma(1 + 1 / self.shape)
        return scale * rng.weibull(self.shape, (histories, count))

    def first(
        self, rng: np.random.Generator, histories: int, count: int, nodes: int
    ) -> FailureTimes:
        times = self.gaps(rng, histories, count).cumsum(axis=1)
        return FailureTimes(times, rng.integers(nodes, size=times.shape))

    def until(
        self, rng: np.random.Generator, histories: int, horizon_s: float, nodes: int
    ) -> FailureTimes:
        if math.isinf(self.mtbf_s):
            return FailureTimes(np.empty((histories, 0)), np.empty((histories, 0), dtype=int))
        mean = horizon_s / self.mtbf_s
        count = math.ceil(mean + 6 * math.sqrt(mean / self.shape) + 10)
        times = self.gaps(rng, histories, count).cumsum(axis=1)
        while times[:, -1].min() < horizon_s:
            check_size(times.size + histories * count)
            more = self.gaps(rng, histories, count).cumsum(axis=1)
            times = np.concatenate([times, times[:, -1:] + more], axis=1)
        times[times >= horizon_s] = math.inf
        times = times[:, : max(1, int((times < math.inf).sum(axis=1).max()))]
        return FailureTimes(times, rng.integers(nodes, size=times.shape))


class Correlated(Checked, frozen=True):
    """Incidents of mean distance `mtbf_s` that include neighbours, and may repeat.

    `mtbf_s` is the distance of all incidents, repetitions included; a simultaneous loss of several
    nodes is one incident.
    """

    mtbf_s: PositiveOrInfinite
    neighbours: NotNegative = 0.0
    """Mean number of further nodes that fail at the same moment (geometric), next to the first: a
    rack, a switch."""
    repeat: Chance = 0.0
    """Probability, below 1, that an incident's node fails again."""
    repeat_after_s: Positive = 3600.0
    """Mean seconds until it fails again (exponential)."""

    def until(
        self, rng: np.random.Generator, histories: int, horizon_s: float, nodes: int
    ) -> FailureTimes:
        """All failures before `horizon_s`.

        First incidents are a Poisson process of rate (1 - repeat)/M; each causes at most one
        repetition, which does the same, so there are 1/(1 - repeat) incidents per first incident.
        """
        first = Renewal(self.mtbf_s / (1 - self.repeat)).until(rng, histories, horizon_s, nodes)
        row, column = np.nonzero(first.times < math.inf)
        times, lost = first.times[row, column], first.nodes[row, column]
        incidents = [(row, times, lost)]
        while len(row) and self.repeat:
            again = rng.random(len(row)) < self.repeat
            later = times + rng.exponential(self.repeat_after_s, len(times))
            again &= later < horizon_s
            row, times, lost = row[again], later[again], lost[again]
            incidents.append((row, times, lost))
        rows, when, where = (np.concatenate(parts) for parts in zip(*incidents, strict=True))
        size = np.ones(len(rows), dtype=int)
        if self.neighbours:
            size = np.minimum(rng.geometric(1 / (1 + self.neighbours), len(rows)), nodes)
        index = np.repeat(np.arange(len(rows)), size)
        offset = np.arange(len(index)) - np.repeat(size.cumsum() - size, size)
        return as_matrix(histories, rows[index], when[index], (where[index] + offset) % nodes)


def as_matrix(
    histories: int, rows: np.ndarray, times: np.ndarray, nodes: np.ndarray
) -> FailureTimes:
    """Convert a list of failures (history, seconds, node) to FailureTimes."""
    check_size(len(rows))
    order = np.lexsort((times, rows))
    rows, times, nodes = rows[order], times[order], nodes[order]
    counts = np.bincount(rows, minlength=histories)
    column = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    matrix = np.full((histories, max(1, int(counts.max()))), math.inf)
    matrix[rows, column] = times
    which = np.zeros(matrix.shape, dtype=int)
    which[rows, column] = nodes
    return FailureTimes(matrix, which)


def check_size(failures: int) -> None:
    """Refuse a simulation that exceeds memory. Raises FieldError: there are too many failures."""
    rule = f'above {MOST_FAILURES} failures do not fit in memory; simulate fewer hours'
    fields.require(failures <= MOST_FAILURES, 'hours', failures, rule)


class TraceError(ValueError):
    """A trace file is unusable; the message names file, line and rule."""


class Trace(Checked, frozen=True):
    """Failures of one real history.

    Simulated histories begin at random moments of the trace and wrap around at its end; the first
    history begins at the start of the trace.
    """

    times: np.ndarray
    """Seconds since the start of the trace, ascending, [failures]."""
    nodes: np.ndarray
    repair_s: np.ndarray
    length_s: Positive
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        inside = len(self.times) == 0 or float(self.times[-1]) < self.length_s
        fields.require(inside, 'length_s', self.length_s, 'must lie after the last failure')

    @property
    def mtbf_s(self) -> float:
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
    """Read a CSV file in the format of the module's docstring.

    Raises TraceError: the file is missing or malformed; the message names file, line and rule.
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
    # The mean gap after the last event keeps the rate when the trace repeats.
    gap = (events[-1][0] - events[0][0]) / (len(events) - 1)
    length = events[-1][0] - start + gap
    return Trace(np.array(times), np.array(nodes, dtype=int), np.array(repairs), length, names)


def _beginning(first: float, last: float) -> float:
    """Start of the trace: zero for relative times; the first event for times of a clock."""
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
