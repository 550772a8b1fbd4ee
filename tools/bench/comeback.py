# SPDX-License-Identifier: Apache-2.0
"""How a job came back from a fault, in its log and events."""

import itertools
from collections.abc import Iterable

import msgspec

from moevement_ext.events import Event, Recovered

from ..lab.evidence import kind_of
from ..lab.run_log import Iteration, RunLog

PHASES = ('process start', 'restore', 'iterations again', 'new iteration')
"""Phases of every recovery, in order."""


class Comeback(msgspec.Struct, frozen=True):
    """The recovery from one fault."""

    seconds: float
    """From the fault to the first iteration that had not been trained before it."""
    phases: dict[str, float]
    """Seconds by phase, of `PHASES`."""
    engine: dict[str, float]
    """Seconds by phase of a replay, on the rank that repeated most; empty without one."""


def comeback(
    log: RunLog,
    events: Iterable[Event],
    started: Iterable[float],
    at: float,
    end: float = float('inf'),
) -> Comeback:
    """Follow a recovery. Times are seconds since the epoch.

    Args:
        log: log of the last rank, over all its processes.
        events: those of all ranks.
        started: when the program began in each process of any rank.
        at: time of the fault.
        end: time of the next fault.

    Raises LabError: no new iteration followed the fault.
    """
    before = log.newest_until(at)
    new = log.first_after(before)
    later = [item for item in log.iterations if item.time > at]
    until = min(new.time, end)
    began = max((time for time in started if at < time < until), default=at)
    reports = [event for event in kind_of(events, Recovered) if at < event.time < until]
    trains = later[0].time - later[0].elapsed_ms / 1000
    if reports:
        trains = max(event.time for event in reports)
    trains = min(max(trains, began), later[0].time)
    again = [item.time for item in later if item.number <= before and item.time < new.time]
    moments = (at, began, trains, max([trains, *again]), new.time)
    seconds = (after - earlier for earlier, after in itertools.pairwise(moments))
    slowest = max(reports, key=lambda event: (event.replayed, event.time), default=None)
    engine = {} if slowest is None else {k: v for k, v in slowest.seconds.items() if v}
    return Comeback(new.time - at, dict(zip(PHASES, seconds, strict=True)), engine)


def stage_iterations(
    log: RunLog, events: Iterable[Event], stages: int, ranks_of_a_stage: int = 1
) -> float:
    """Stage-iterations computed again: trained again by all, or replayed by some."""
    repeated = len(log.iterations) - len(kept(log))
    replayed = sum(event.replayed for event in kind_of(events, Recovered))
    return repeated * stages + replayed / ranks_of_a_stage


def kept(log: RunLog) -> list[Iteration]:
    """Iterations from the first one on that are not trained again later, in order."""
    last = {item.number: item for item in log.iterations}
    return [last[number] for number in sorted(last) if number >= log.iterations[0].number]
