# SPDX-License-Identifier: Apache-2.0
"""Figures of a job of a comparison: pure functions of its log and events."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from moevement_ext.events import Recovered, TokensLost, WindowOnDisk, WindowPersisted

from ..lab.errors import LabError
from ..lab.evidence import kind_of
from ..lab.run_log import Iteration, RunLog
from .rows import Keeps
from .running import RANKS, STAGES, Course, InjectedFault, Lived

PHASES = ('process start', 'restore', 'iterations again', 'new iteration')
"""Phases of every recovery, in order."""


class Comeback(NamedTuple):
    """The recovery from one fault."""

    seconds: float
    """From the fault to the first iteration that had not been trained before it."""
    phases: dict[str, float]
    """Seconds by phase, of `PHASES`."""
    engine: dict[str, float]
    """Seconds by phase of a replay, on the rank that repeated most; empty without one."""


class Curves(msgspec.Struct, frozen=True):
    """A run over time, for a picture; seconds since its first iteration."""

    faults: list[tuple[float, str]]
    """Seconds and kind."""
    kept: list[tuple[float, int]]
    """Seconds and number of each iteration that was kept."""


def span_s(log: RunLog) -> float:
    """Seconds from the first logged iteration to the last.

    Raises LabError: there are fewer than two.
    """
    if len(log.iterations) < 2:
        raise LabError('a job logged fewer than two iterations; take more --iterations')
    return log.iterations[-1].time - log.iterations[0].time


def pace_s(plain: RunLog) -> float:
    return span_s(plain) / (plain.iterations[-1].number - plain.iterations[0].number)


def ettr(log: RunLog, iteration_s: float, without_s: float = 0.0) -> float:
    """Useful time over wall time, from the first iteration on."""
    useful = log.iterations[-1].number - log.iterations[0].number
    return useful * iteration_s / (span_s(log) - without_s)


def undisturbed(log: RunLog, injected: Sequence[InjectedFault]) -> list[float]:
    """Seconds of the iterations without a failure, during or right after them."""
    return [seconds for _, seconds in _undisturbed(log, injected)]


def _undisturbed(log: RunLog, injected: Sequence[InjectedFault]) -> Iterator[tuple[int, float]]:
    """Seconds of each undisturbed iteration, and the number of the iteration before it."""
    for before, after in itertools.pairwise(log.iterations):
        struck = any(before.time <= fault.at <= after.time for fault in injected)
        if after.number == before.number + 1 and not struck:
            yield before.number, after.time - before.time


def repeated(log: RunLog) -> int:
    """Number of logged iterations that had been trained, or are trained again later."""
    return len(log.iterations) - len(kept(log))


def kept(log: RunLog) -> list[Iteration]:
    """Iterations from the first one on that are not trained again later, in order."""
    last = {item.number: item for item in log.iterations}
    return [last[number] for number in sorted(last) if number >= log.iterations[0].number]


def comebacks(lived: Lived) -> Iterator[Comeback]:
    """Yield the recovery from each fault. Raises LabError: no new iteration followed a fault."""
    ends = [*(fault.at for fault in lived.injected[1:]), float('inf')]
    for fault, end in zip(lived.injected, ends, strict=True):
        yield _comeback(lived, fault.at, end)


def _comeback(lived: Lived, at: float, end: float) -> Comeback:
    log = lived.trained.log
    before = log.newest_until(at)
    new = log.first_after(before)
    later = [item for item in log.iterations if item.time > at]
    until = min(new.time, end)
    started = max((time for time in lived.started if at < time < until), default=at)
    reports = [event for event in kind_of(lived.trained.events, Recovered)
               if at < event.time < until]  # fmt: skip
    trains = later[0].time - later[0].elapsed_ms / 1000
    if reports:
        trains = max(event.time for event in reports)
    trains = min(max(trains, started), later[0].time)
    again = max((item.time for item in later if item.number <= before and item.time < new.time),
                default=trains)  # fmt: skip
    moments = (at, started, trains, max(again, trains), new.time)
    seconds = (after - earlier for earlier, after in itertools.pairwise(moments))
    slowest = max(reports, key=lambda event: (event.replayed, event.time), default=None)
    engine = {} if slowest is None else {k: v for k, v in slowest.seconds.items() if v}
    return Comeback(new.time - at, dict(zip(PHASES, seconds, strict=True)), engine)


def stage_iterations(lived: Lived) -> float:
    """Stage-iterations computed again, per fault: trained again by all, or replayed by some."""
    replayed = sum(event.replayed for event in kind_of(lived.trained.events, Recovered))
    per_stage = RANKS // STAGES
    return (repeated(lived.trained.log) * STAGES + replayed / per_stage) / len(lived.injected)


def curves(lived: Lived) -> Curves:
    log = lived.trained.log
    origin = log.iterations[0].time
    return Curves(
        faults=[(fault.at - origin, str(fault.kind)) for fault in lived.injected],
        kept=[(item.time - origin, item.number) for item in kept(log)],
    )


def waited_ms(keeps: Keeps, lived: Lived, course: Course) -> float:
    """Return the mean milliseconds per iteration for which training waits for checkpoints.

    Sparse checkpointing logs them. For Megatron's saves they are the additional time of the
    iterations that save, compared with the median of others: of those with an evaluation, if they
    have one, too. The first save of a process takes much longer than later ones, and counts.
    """
    log = lived.trained.log
    if keeps is not Keeps.DISK:
        return sum(slot.exposed_ms for slot in log.captured) / len(log.iterations)
    saves: list[tuple[bool, float]] = []
    others: dict[bool, list[float]] = {False: [], True: []}
    for number, seconds in _undisturbed(log, lived.injected):
        evaluates = number % course.evaluate == 0
        if number % course.interval:
            others[evaluates].append(seconds)
        else:
            saves.append((evaluates, seconds))
    stalls_s = [
        seconds - statistics.median(others[evaluates])
        for evaluates, seconds in saves
        if others[evaluates]
    ]
    return max(1000 * statistics.mean(stalls_s) / course.interval, 0.0) if stalls_s else 0.0


def period(keeps: Keeps, lived: Lived, interval: int) -> int:
    """Return the iterations between two checkpoints, or of a window; without any, of the job.

    For host memory, the plan in force in the median iteration counts: plans change within a run,
    and a window may be longer than the run, so that no second window is ever committed.
    """
    if keeps is Keeps.DISK:
        return interval
    log = lived.trained.log
    if not log.captured:
        return log.iterations[-1].number
    return statistics.median_low(slot.interval or slot.window for slot in log.captured)


def unprotected(keeps: Keeps, lived: Lived, interval: int) -> int:
    """Number of faults before the first checkpoint was complete."""
    log = lived.trained.log.iterations
    if keeps is Keeps.NOTHING:
        return 0
    if keeps is Keeps.DISK:
        # The iteration after a synchronous save is logged once the save is complete.
        ready = min((item.time for item in log if item.number > interval), default=0.0)
    else:
        # A checkpoint that is copied to disk counts once all ranks have it there.
        events = lived.trained.events
        on_disk = [event.time for event in kind_of(events, WindowOnDisk)]
        persisted = [event.time for event in kind_of(events, WindowPersisted)]
        ready = min(on_disk or persisted, default=float('inf'))
    return sum(fault.at < ready for fault in lived.injected)


def lost_tokens(lived: Lived) -> float | None:
    """Share of all tokens whose updates of experts were lost, by each rank's newest event."""
    newest = {event.rank: event.share for event in kind_of(lived.trained.events, TokensLost)}
    return statistics.mean(newest.values()) if newest else None
