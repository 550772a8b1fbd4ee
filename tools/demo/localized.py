# SPDX-License-Identifier: Apache-2.0
"""What the events say about a recovery in which one pipeline stage went back, and only that one."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET

from moevement_ext.events import (
    Event,
    FailureDetected,
    NextTier,
    Recovered,
    RecoveryStarted,
    WorkerStarted,
)
from tools.lab.errors import LabError
from tools.lab.evidence import kind_of, ranks_with
from tools.lab.plots import Doing, Failure, Lane, LocalizedFailure, Span
from tools.lab.run_log import Iteration, RunLog

Events = Sequence[Event]

PHASES = ('detect', 'unblock', 'respawn', 'regroup', 'fetch', 'convert', 'catch_up')


class StageRecovery(NamedTuple):
    """One pipeline stage in the recovery."""

    replayed: int
    """Iterations computed again."""
    phases: dict[str, float]
    """Seconds by phase, of the rank that took longest for it."""


class LocalizedRecovery(NamedTuple):
    """How the job came back."""

    lost: int
    """The stage that lost its state."""
    stages: list[StageRecovery]
    new: Iteration
    """The first new one that was logged."""
    seconds: float
    """From the kill until `new`."""
    starting: float
    """Seconds of those until the lost stage began to replay: its processes start, all meet."""
    replaying: float
    """Seconds of those from then until the lost stage was back."""

    @property
    def replayed(self) -> int:
        """Iterations that the lost stage computed again."""
        return self.stages[self.lost].replayed


def recovery(
    events: Events,
    log: RunLog,
    killed_at: float,
    stage_ranks: Sequence[Sequence[int]],
    lost: int,
) -> LocalizedRecovery:
    """Check that the recovery was localized, and read it out of the events.

    Args:
        events: of all ranks, in the order of time.
        log: of the last rank, which survives.
        killed_at: when stage `lost` was killed (seconds since the epoch).
        stage_ranks: ranks by pipeline stage.
        lost: the stage whose ranks were killed.

    Raises:
        LabError: another stage lost its state as well, or the job never went on.
    """
    _check_processes(events, stage_ranks, lost)
    recovered = _recovered(events, [rank for ranks in stage_ranks for rank in ranks], lost)
    if len(log.lives) != 1:
        raise _not_localized(f'the log of the last rank has {len(log.lives)} lives instead of one')
    target = max(event.target for event in recovered.values() if isinstance(event.target, int))
    new = log.first_after(target)
    if new is None:
        raise LabError(f'no iteration was logged after the recovery to iteration {target}')
    stages = [_stage_recovery([recovered[rank] for rank in ranks]) for ranks in stage_ranks]
    starting, replaying = _lost_spans(events, killed_at, stage_ranks[lost])
    return LocalizedRecovery(
        lost,
        stages,
        new,
        new.time - killed_at,
        starting.end - starting.start,
        replaying.end - replaying.start,
    )


def all_recovered(events: Events, ranks: Sequence[int]) -> bool:
    """Whether every rank has reported its recovery."""
    return ranks_with(events, Recovered) >= set(ranks)


def _check_processes(events: Events, stage_ranks: Sequence[Sequence[int]], lost: int) -> None:
    """Processes of the lost stage were started twice, those of the others once."""
    for event in kind_of(events, NextTier):
        raise _not_localized(f'rank {event.rank} gave it up: {event.reason}')
    started = [event.rank for event in kind_of(events, WorkerStarted)]
    for stage, ranks in enumerate(stage_ranks):
        expected = 2 if stage == lost else 1
        for rank in ranks:
            if started.count(rank) != expected:
                raise _not_localized(
                    f'the process of rank {rank} (stage {stage}) was started '
                    f'{started.count(rank)} times instead of {expected}'
                )


def _recovered(events: Events, ranks: Sequence[int], lost: int) -> dict[int, Recovered]:
    """The newest `recovered` event of each rank."""
    found = {event.rank: event for event in kind_of(events, Recovered)}
    missing = sorted(set(ranks) - set(found))
    if missing:
        raise _not_localized(f'ranks {missing} did not report a recovery')
    for rank, event in found.items():
        scope = 'the whole job' if event.scope is UNSET else event.scope
        stages = None if event.stages is UNSET else event.stages
        if not event.localized or stages != [lost]:
            raise _not_localized(
                f'rank {rank} reports scope {scope!r}, stages {stages} instead of '
                f"'localized', [{lost}]"
            )
    return found


def _not_localized(reason: str) -> LabError:
    return LabError(f'the recovery was not localized: {reason}; see the logs and events of the run')


def _stage_recovery(recovered: Sequence[Recovered]) -> StageRecovery:
    return StageRecovery(
        replayed=max(event.replayed for event in recovered),
        phases={name: max(event.seconds[name] for event in recovered) for name in PHASES},
    )


def story(
    events: Events,
    log: RunLog,
    found: LocalizedRecovery,
    killed_at: float,
    stage_ranks: Sequence[Sequence[int]],
    titles: Sequence[str],
) -> LocalizedFailure:
    """What is drawn of the recovery.

    Args:
        events: of all ranks, in the order of time.
        log: of the last rank.
        found: of these events and this log.
        killed_at: when the lost stage was killed (seconds since the epoch).
        stage_ranks: ranks by pipeline stage.
        titles: of the lanes, by stage.
    """
    before = [iteration for iteration in log.iterations if iteration.time <= killed_at]
    began = log.iterations[0].time - log.iterations[0].elapsed_ms / 1000
    ended = log.iterations[-1].time
    lanes = []
    for stage, (title, ranks) in enumerate(zip(titles, stage_ranks, strict=True)):
        if stage == found.lost:
            spans = _lost_spans(events, killed_at, ranks)
        else:
            spans = _kept_spans(events, killed_at, ranks)
        training = Span(Doing.TRAINING, began, spans[0].start)
        again = Span(Doing.TRAINING, spans[-1].end, ended)
        lanes.append(Lane(title, [training, *spans, again]))
    what = f'stage {found.lost} lost with its node'
    return LocalizedFailure(Failure(what, killed_at, before[-1], found.new), lanes)


def _lost_spans(events: Events, killed_at: float, ranks: Sequence[int]) -> list[Span]:
    """Spans of the stage that was killed; its slowest rank counts."""
    recent = _since(events, killed_at, ranks)
    replay = _last(recent, RecoveryStarted)
    return [
        Span(Doing.STARTING, killed_at, replay),
        Span(Doing.REPLAYING, replay, _last(recent, Recovered)),
    ]


def _kept_spans(events: Events, killed_at: float, ranks: Sequence[int]) -> list[Span]:
    """Spans of a stage that lives on: it waits once its first rank has noticed the failure."""
    recent = _since(events, killed_at, ranks)
    noticed = min(event.time for event in kind_of(recent, FailureDetected))
    return [Span(Doing.WAITING, noticed, _last(recent, Recovered))]


def _since(events: Events, time: float, ranks: Sequence[int]) -> Events:
    return [event for event in events if event.rank in ranks and event.time > time]


def _last(events: Events, kind: type[Event]) -> float:
    return max(event.time for event in kind_of(events, kind))
