# SPDX-License-Identifier: Apache-2.0
"""Figures of a job of a comparison: pure functions of its log and events."""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from moevement_ext.events import TokensLost

from ..bench.comeback import PHASES, comeback, kept, stage_iterations
from ..lab.evidence import kind_of
from ..lab.figures import medians
from ..lab.programs import LabError
from ..lab.run_log import RunLog
from .rows import Keeps, Row
from .running import RANKS, STAGES, Course, Lived

VALIDATION = 'validation losses'
"""Reported like a kind of state."""


class Curves(msgspec.Struct, frozen=True):
    """A run over time, for a picture; seconds since its first iteration."""

    faults: list[float]
    kept: list[float]
    """End of each iteration that was kept."""


class RowRun(msgspec.Struct, frozen=True, kw_only=True):
    """One row in one round."""

    iteration_s: float
    """Seconds of an iteration of plain Megatron."""
    period: int | None
    """The interval of its checkpoints, or the window; None: it keeps nothing."""
    ratio: float
    """Seconds of an undisturbed iteration over those of plain Megatron."""
    mbytes: float | None
    """Megabytes that a rank captures, or saves, in an iteration; mean."""
    stall_ms: float
    """Milliseconds in an iteration for which training waits for checkpoints; mean."""
    recovery_s: float
    """Median over the faults."""
    phases: dict[str, float]
    """Seconds; medians over the faults."""
    again: float
    """Stage-iterations computed again, per fault."""
    lost_tokens: float | None
    """Share of all tokens whose updates of experts were lost (PLT); None: the row loses none."""
    loss: float
    """Loss of the last iteration, minus that of plain Megatron."""
    different: list[str]
    """Kinds of state that differ from plain Megatron at the end."""
    bits: str
    ettr: float
    """Time of the kept iterations at the pace of plain Megatron, divided by the whole time."""
    ettr_warm: float
    """The same without the seconds until new processes ran the program."""
    curves: Curves


def figures(row: Row, lived: Lived, plain: Lived, course: Course) -> RowRun:
    """Compute the figures of a job, relative to plain Megatron in the same round.

    Raises LabError: the job did not recover from a fault.
    """
    log, reference = lived.trained.log, plain.trained.log
    iteration_s = pace_s(reference)
    back = [
        comeback(log, lived.trained.events, lived.started, at, end)
        for at, end in itertools.pairwise([*lived.faults, math.inf])
    ]
    phases = medians([one.phases for one in back])
    captured = sum(slot.nbytes for slot in log.captured) / len(log.iterations)
    saved = lived.checkpoint_bytes / RANKS / course.interval
    different = lived.trained.different(plain.trained)
    if log.validated != reference.validated:
        different.append(VALIDATION)
    named = 'differs' if row.exact or row.lossy else ''.join(different[:1])
    return RowRun(
        iteration_s=iteration_s,
        period=period(row.keeps, lived, course.interval),
        ratio=statistics.mean(s for _, s in undisturbed(log, lived.faults)) / iteration_s,
        mbytes=(captured or saved) / 1e6 or None,
        stall_ms=waited_ms(row.keeps, lived, course),
        recovery_s=statistics.median(one.seconds for one in back),
        phases=phases,
        again=stage_iterations(log, lived.trained.events, STAGES, RANKS // STAGES) / len(back),
        lost_tokens=lost_tokens(lived) if row.lossy else None,
        loss=log.iterations[-1].loss - reference.iterations[-1].loss,
        different=different,
        bits=named if different else 'equal',
        ettr=ettr(log, iteration_s),
        ettr_warm=ettr(log, iteration_s, sum(one.phases[PHASES[0]] for one in back)),
        curves=curves(lived),
    )


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


def undisturbed(log: RunLog, faults: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Seconds of the iterations without a failure, during or right after them.

    With each, the number of the iteration before it.
    """
    for before, after in itertools.pairwise(log.iterations):
        struck = any(before.time <= at <= after.time for at in faults)
        if after.number == before.number + 1 and not struck:
            yield before.number, after.time - before.time


def curves(lived: Lived) -> Curves:
    log = lived.trained.log
    origin = log.iterations[0].time
    return Curves(
        faults=[at - origin for at in lived.faults],
        kept=[item.time - origin for item in kept(log)],
    )


def goodput(curves: Curves, iteration_s: float, width_s: float) -> np.ndarray:
    """Share of each span of `width_s` seconds in iterations that were kept, [spans].

    An iteration counts from the end of the previous one, for at most `iteration_s`; iterations that
    the job trained again later do not count.
    """
    ends = np.array(curves.kept)
    begins = np.maximum(ends - iteration_s, np.concatenate([[ends[0]], ends[:-1]]))
    edges = np.arange(0, ends[-1] + width_s, width_s)
    until, since = np.minimum.outer(ends, edges[1:]), np.maximum.outer(begins, edges[:-1])
    useful: np.ndarray = np.clip(until - since, 0, None).sum(axis=0) / width_s
    return useful


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
    for number, seconds in undisturbed(log, lived.faults):
        evaluates = number % course.evaluate == 0
        if number % course.interval:
            others[evaluates].append(seconds)
        else:
            saves.append((evaluates, seconds))
    usual = {evaluates: statistics.median(found) for evaluates, found in others.items() if found}
    stalls_s = [seconds - usual[kind] for kind, seconds in saves if kind in usual]
    return max(1000 * statistics.mean(stalls_s) / course.interval, 0.0) if stalls_s else 0.0


def period(keeps: Keeps, lived: Lived, interval: int) -> int | None:
    """Return the iterations between two checkpoints, or of a window; None without any.

    For host memory, the plan in force in the median iteration counts: plans change within a run,
    and a window may be longer than the run, so that no second window is ever committed.
    """
    if keeps is Keeps.DISK:
        return interval
    slots = lived.trained.log.captured
    return statistics.median_low(one.interval or one.window for one in slots) if slots else None


def lost_tokens(lived: Lived) -> float | None:
    """Share of all tokens whose updates of experts were lost, by each rank's newest event."""
    newest = {event.rank: event.share for event in kind_of(lived.trained.events, TokensLost)}
    return statistics.mean(newest.values()) if newest else None
