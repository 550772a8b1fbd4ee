# SPDX-License-Identifier: Apache-2.0
"""Times and nodes of failures: Poisson, Weibull, or from a trace.

Many independent histories are drawn at once: of a process a number of failures, of all those up to
a horizon.

A trace is a CSV file with the columns time, node, event, as docs/assets/simulate-trace.csv.
Times are seconds from the start or from a clock, in any order; names of nodes are free; events are
`failure` and `repair`. A failure of a node that is already down counts, too; a repair ends all
failures of its node, which can then serve as a spare.
"""

import csv
import math
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from ..model.description import DescriptionError
from ..model.fields import Number, require

MOST_FAILURES = 20_000_000
"""Limit of failures in one simulation, over all histories, given by memory."""


class FailureTimes(NamedTuple):
    """Failures of several histories; arrays of shape [histories, failures]."""

    times: np.ndarray
    """Seconds since the start, ascending along a row; inf after the last failure of a history."""
    nodes: np.ndarray
    """The failed node, 0 .. nodes - 1."""
    repair_s: np.ndarray | None = None
    """Seconds until the node can be a spare; None if not given (a trace gives it)."""


class Process(msgspec.Struct, frozen=True):
    """Failures with independent Weibull gaps; all nodes are equally likely to fail."""

    mtbf_s: float
    shape: float = 1.0
    """1: the Poisson process; below 1 failures bunch, above 1 they are regular."""

    def gaps(self, rng: np.random.Generator, histories: int, count: int) -> np.ndarray:
        check_size(histories * count)
        if self.shape == 1:
            return rng.exponential(self.mtbf_s, (histories, count))
        scale_s = self.mtbf_s / math.gamma(1 + 1 / self.shape)
        return scale_s * rng.weibull(self.shape, (histories, count))

    def first(
        self, rng: np.random.Generator, histories: int, count: int, nodes: int
    ) -> FailureTimes:
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


def check_size(failures: int) -> None:
    """Refuse a simulation that exceeds memory. Raises FieldError: there are too many failures."""
    rule = f'above {MOST_FAILURES} failures do not fit in memory; simulate fewer hours'
    require(failures <= MOST_FAILURES, 'hours', failures, rule)


class Trace(NamedTuple):
    """Failures of one real history.

    Simulated histories begin at random moments of the trace and wrap around at its end; the first
    history begins at the start of the trace.
    """

    times: np.ndarray
    """Seconds since the start of the trace, ascending, [failures]."""
    nodes: np.ndarray
    repair_s: np.ndarray
    length_s: float
    """Beyond the last failure."""

    @property
    def mtbf_s(self) -> float:
        return self.length_s / len(self.times)

    @property
    def least_nodes(self) -> int:
        return int(self.nodes.max()) + 1

    def until(
        self, rng: np.random.Generator, histories: int, horizon_s: float, nodes: int
    ) -> FailureTimes:
        """All failures before `horizon_s`; raises FieldError if `nodes` are too few for them."""
        rule = f'the trace has {self.least_nodes} nodes'
        require(nodes >= self.least_nodes, 'nodes', nodes, rule)
        rounds = math.ceil(horizon_s / self.length_s) + 1
        check_size(histories * rounds * len(self.times))
        begin = rng.random((histories, 1)) * self.length_s
        begin[0] = 0
        turns = np.repeat(np.arange(rounds) * self.length_s, len(self.times))
        times = turns + np.tile(self.times, rounds) - begin
        inside = (times >= 0) & (times < horizon_s)
        order = np.argsort(~inside, axis=1, kind='stable')[:, : int(inside.sum(axis=1).max())]
        ordered = np.take_along_axis(np.where(inside, times, math.inf), order, axis=1)
        which = order % len(self.times)
        return FailureTimes(ordered, self.nodes[which], self.repair_s[which])


Failures = Process | Trace


class _Event(msgspec.Struct):
    time: Number
    node: Annotated[str, Meta(min_length=1)]
    event: Literal['failure', 'repair']


def read_trace(path: Path) -> Trace:
    """Read a CSV file in the format of the module's docstring.

    Raises DescriptionError: the file is missing or malformed; the message names file and field.
    """
    try:
        with path.open(newline='', encoding='utf-8') as file:
            listed = msgspec.convert([*csv.DictReader(file)], list[_Event], strict=False)
    except (OSError, UnicodeDecodeError, csv.Error, msgspec.ValidationError) as error:
        rule = 'give a CSV file with the columns time,node,event; events: failure, repair'
        raise DescriptionError(f'{path}: {error}; {rule}') from error
    events = sorted(listed, key=lambda one: one.time)
    failed = [one for one in events if one.event == 'failure']
    if not failed or events[0].time == events[-1].time:
        raise DescriptionError(f'{path}: give a failure, and an event at another time')
    names = sorted({one.node for one in events})
    repairs = [
        min((later.time for later in events[number:]
             if later.event == 'repair' and later.node == one.node), default=math.inf) - one.time
        for number, one in enumerate(events) if one.event == 'failure'
    ]  # fmt: skip
    first, last = events[0].time, events[-1].time
    # The mean gap after the last event keeps the rate when the trace repeats. Times of a clock
    # begin at the first event, those of a job at 0.
    gap, start = (last - first) / (len(events) - 1), 0.0 if 0 <= first < last - first else first
    return Trace(
        np.array([one.time - start for one in failed]),
        np.array([names.index(one.node) for one in failed]),
        np.array(repairs),
        last - start + gap,
    )
