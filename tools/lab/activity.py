# SPDX-License-Identifier: Apache-2.0
"""Activity of ranks over time, from their events."""

import enum
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moevement_ext.events import (
    Event,
    FailureDetected,
    Finished,
    Protected,
    Recovered,
    RecoveryPhase,
    RecoveryStarted,
    WindowCommitted,
    WorkerStarted,
)


class Doing(enum.StrEnum):
    """Activity of a rank, or of a pipeline stage."""

    TRAINING = 'training'
    WAITING = 'waiting (state kept)'
    STARTING = 'starting process'
    REPLAYING = 'replaying'


class Span(NamedTuple):
    """A period, in seconds since the epoch."""

    doing: Doing
    start: float
    end: float


def together(lanes: Sequence[Sequence[Span]]) -> list[Span]:
    """Combine ranks: at each time, the activity that most of the job waits for."""
    changes: dict[float, Counter[Doing]] = defaultdict(Counter)
    for span in itertools.chain.from_iterable(lanes):
        changes[span.start][span.doing] += 1
        changes[span.end][span.doing] -= 1
    merged: list[Span] = []
    present: Counter[Doing] = Counter()
    for start, end in itertools.pairwise(sorted(changes)):
        present.update(changes[start])
        doing = next((doing for doing in _GRAVEST_FIRST if present[doing]), None)
        if doing is None:
            continue
        if merged and merged[-1].doing is doing and merged[-1].end == start:
            start = merged.pop().start
        merged.append(Span(doing, start, end))
    return merged


_GRAVEST_FIRST = (Doing.STARTING, Doing.REPLAYING, Doing.WAITING, Doing.TRAINING)


def restarts(spans: Sequence[Span]) -> Iterator[Span]:
    """Spans of starts after planned stops, until the rank trains."""
    for before, span in itertools.pairwise(spans):
        if span.start > before.end:
            following = spans[spans.index(span) :]
            yield from itertools.takewhile(lambda one: one.doing is not Doing.TRAINING, following)


def stops(spans: Sequence[Span]) -> Iterator[tuple[float, float]]:
    """Times in which a rank did not train, except starts after planned stops."""
    planned = set(restarts(spans))
    for span in spans:
        if span.doing is not Doing.TRAINING and span not in planned:
            yield span.start, span.end


def spans(turns: Sequence[tuple[float, Doing | None]], end: float) -> list[Span]:
    """Spans between turns, the last one up to `end`; none for a stopped rank."""
    ends = [*(time for time, _ in turns[1:]), end]
    found = [
        Span(doing, start, stop)
        for (start, doing), stop in zip(turns, ends, strict=True)
        if doing is not None and stop > start
    ]
    return together([found])


def turns(
    events: Sequence[Event], noticed: Sequence[float], window_s: float
) -> list[tuple[float, Doing | None]]:
    """Times at which a rank changed its activity, with the new one; None: it ended as planned."""
    found: list[tuple[float, Doing | None]] = []
    fresh = False  # set up, but not trained since
    stopped = False
    before = 0.0
    for event in events:
        match event:
            case WorkerStarted() if stopped:
                found.append((before, None))
                found.append((max(event.time - event.start_up_s, before), Doing.STARTING))
            case WorkerStarted():
                created = event.time - event.start_up_s
                gone = noticed[bisect_right(noticed, before) : bisect_left(noticed, event.time)][:1]
                # If all workers died, no rank noticed; a survivor would have reported a window by
                # now. A hot spare was created long before the rank was lost.
                alone = max(min(created, before + window_s), before)
                found.append((min(gone, default=alone) if before else created, Doing.STARTING))
            case Protected() if found and found[-1][1] is Doing.STARTING:
                found.append((event.time, Doing.TRAINING))
                fresh = True
            case RecoveryPhase() | RecoveryStarted() | FailureDetected() if fresh:
                found.pop()  # the process was set up for a recovery
                fresh = False
            case FailureDetected() if event.reason is not None:
                found.append((event.time, Doing.WAITING))
            case WindowCommitted():
                fresh = False
                if found and found[-1][1] is Doing.STARTING:
                    found.append((event.time, Doing.TRAINING))
            case Recovered():
                found.append((event.time, Doing.TRAINING))
        if isinstance(event, RecoveryStarted):
            found.append((event.time, Doing.REPLAYING))
        before, stopped = event.time, isinstance(event, Finished)
    return found or [(events[0].time, Doing.TRAINING)]
