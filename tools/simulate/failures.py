# SPDX-License-Identifier: Apache-2.0
"""When failures strike, and which nodes: Poisson, Weibull, correlated; traces are in `trace`.

A process draws many independent histories at once. Renewal processes (independent gaps) can be
drawn by number of failures, all others up to a horizon.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tools.simulate import fields

MOST_FAILURES = 20_000_000
"""Failures in one simulation, over all histories, beyond which memory would not do."""
LEAST_SHAPE = 0.1
"""The least shape of Weibull gaps: below it nearly all of the time is in a few of them."""


@dataclass(frozen=True)
class FailureTimes:
    """Failures of several histories; arrays of shape [histories, failures]."""

    times: np.ndarray
    """Seconds since the start, ascending along a row; inf after the last failure of a history."""
    nodes: np.ndarray
    """The node that is lost, 0 .. nodes - 1."""
    repair_s: np.ndarray | None = None
    """Seconds until the node can be a spare, where the process knows (a trace does)."""


class Process(Protocol):
    """Anything that draws failures."""

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures."""

    def until(
        self, rng: np.random.Generator, histories: int, horizon_s: float, nodes: int
    ) -> FailureTimes:
        """All failures before `horizon_s`."""


@dataclass(frozen=True)
class Renewal:
    """Independent gaps of mean `mtbf_s`, Weibull with `shape`; 1 is the Poisson process.

    A shape below 1 makes failures come in bunches (a failure is likely soon after another), one
    above 1 makes them regular. Any node alike is struck.
    """

    mtbf_s: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        fields.positive_or_infinite('mtbf_s', self.mtbf_s)
        fields.positive('shape', self.shape)
        rule = f'give {LEAST_SHAPE:g} or more'
        fields.require(self.shape >= LEAST_SHAPE, 'shape', self.shape, rule)

    def gaps(self, rng: np.random.Generator, histories: int, count: int) -> np.ndarray:
        """Seconds from each failure to the next, [histories, count]."""
        check_size(histories * count)
        if self.shape == 1:
            return rng.exponential(self.mtbf_s, (histories, count))
        scale = self.mtbf_s / math.gamma(1 + 1 / self.shape)
        return scale * rng.weibull(self.shape, (histories, count))

    def first(
        self, rng: np.random.Generator, histories: int, count: int, nodes: int
    ) -> FailureTimes:
        """The first `count` failures of each history."""
        times = self.gaps(rng, histories, count).cumsum(axis=1)
        return FailureTimes(times, rng.integers(nodes, size=times.shape))

    def until(
        self, rng: np.random.Generator, histories: int, horizon_s: float, nodes: int
    ) -> FailureTimes:
        """All failures before `horizon_s`."""
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


@dataclass(frozen=True)
class Correlated:
    """Incidents of mean distance `mtbf_s` that take neighbours along and come back.

    `mtbf_s` is the distance of incidents, first ones and repetitions together; a simultaneous loss
    of several nodes is one incident.
    """

    mtbf_s: float
    neighbours: float = 0.0
    """Mean number of further nodes lost at the same moment (geometric), next to the first one: a
    rack, a switch."""
    repeat: float = 0.0
    """Probability, below 1, that an incident's node fails once more (a repeat offender)."""
    repeat_after_s: float = 3600.0
    """Mean seconds until it does (exponential)."""

    def __post_init__(self) -> None:
        fields.positive_or_infinite('mtbf_s', self.mtbf_s)
        fields.not_negative('neighbours', self.neighbours)
        rule = 'a probability; give a number from 0 to below 1'
        fields.require(0 <= self.repeat < 1, 'repeat', self.repeat, rule)
        fields.positive('repeat_after_s', self.repeat_after_s)

    def until(
        self, rng: np.random.Generator, histories: int, horizon_s: float, nodes: int
    ) -> FailureTimes:
        """All failures before `horizon_s`.

        First incidents are a Poisson process of rate (1 - repeat)/M; each begets at most one
        repetition, which does the same, so there are 1/(1 - repeat) incidents a first one.
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
    """Failures listed one by one (history, seconds, node), as FailureTimes."""
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
    """Refuse a simulation that would not fit in memory.

    Raises:
        FieldError: there would be too many failures.
    """
    rule = f'above {MOST_FAILURES} failures do not fit in memory; simulate fewer hours'
    fields.require(failures <= MOST_FAILURES, 'hours', failures, rule)
