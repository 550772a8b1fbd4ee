# SPDX-License-Identifier: Apache-2.0
"""The history of a run, from its events: activity of ranks, failures, use of time."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from moevement_ext.events import (
    Event,
    FailureDetected,
    Finished,
    JobDescribed,
    LossLogged,
    NextTier,
    Protected,
    ProtectionReduced,
    Recovered,
    RecoveryPhase,
    RecoveryStarted,
    Replanned,
    Resharded,
    SlowRank,
    WindowCommitted,
    WindowPersisted,
    WorkerStarted,
)

from . import activity
from .activity import Doing, Span
from .evidence import kind_of
from .following import Follower
from .programs import LabError
from .tables import clock

PROCESS_START = 'process_start'
"""Phase from the failure until the new process runs the program."""


class Progress(NamedTuple):
    """Undisturbed iterations of one rank, from one committed window to the next."""

    time: float
    """Commit time of the later window, in seconds since the epoch."""
    iterations: int
    training_s: float
    exposed_s: float
    """Seconds that sparse checkpointing added to them."""


class Pace(NamedTuple):
    """Mean seconds of an undisturbed iteration."""

    iteration_s: float
    exposed_s: float
    """Part of these seconds that sparse checkpointing added."""

    @property
    def overhead(self) -> float:
        """Time of an iteration, divided by what it would take without this part."""
        return self.iteration_s / max(self.iteration_s - self.exposed_s, 1e-9)

    @classmethod
    def of(cls, pieces: Sequence[Progress]) -> Self | None:
        """Pace over `pieces`; None without any iteration."""
        iterations = sum(piece.iterations for piece in pieces)
        if not iterations:
            return None
        return cls(
            sum(piece.training_s for piece in pieces) / iterations,
            sum(piece.exposed_s for piece in pieces) / iterations,
        )


@dataclass(frozen=True)
class Episode:
    """From a failure until all ranks train again; later failures meanwhile are included."""

    start: float
    """Time when the first rank stopped training, in seconds since the epoch."""
    end: float | None
    """Time when the last rank had recovered; None: some have not."""
    events: Sequence[Event]

    def away_s(self, now: float) -> float:
        """Seconds from when the first rank noticed it until the last one trains again, or `now`."""
        return max((self.end or now) - self.start, 0.0)

    @property
    def reasons(self) -> list[str]:
        """Reasons that survivors detected, each once."""
        found = (event.reason for event in kind_of(self.events, FailureDetected))
        return list(dict.fromkeys(reason for reason in found if isinstance(reason, str)))

    @property
    def replaced(self) -> list[int]:
        return sorted({event.rank for event in kind_of(self.events, WorkerStarted)})

    @property
    def recovered(self) -> list[Recovered]:
        """Newest report of each rank."""
        return list({event.rank: event for event in kind_of(self.events, Recovered)}.values())

    @property
    def gave_up(self) -> list[NextTier]:
        """Ways to recover that failed, each once."""
        found = {(event.tier, event.reason): event for event in kind_of(self.events, NextTier)}
        return list(found.values())

    @property
    def scope(self) -> str:
        """Kind of the recovery, for people."""
        if self.end is None:
            return 'not over'
        if not self.recovered:
            return 'from a checkpoint or the start'
        return 'localized' if all(event.localized for event in self.recovered) else 'whole job'

    @property
    def stages(self) -> list[int]:
        return sorted({stage for event in self.recovered for stage in event.stages})

    @property
    def replayed(self) -> int:
        """Number of iterations computed again, on the rank with the most."""
        return max((event.replayed for event in self.recovered), default=0)

    @property
    def verified(self) -> int:
        return sum(event.verified for event in self.recovered)

    @property
    def differing(self) -> list[tuple[int, str]]:
        """Rank and operator of each recovered state that differed."""
        return [(event.rank, name) for event in self.recovered for name in event.differing]

    @property
    def slowest(self) -> Recovered | None:
        """Report with the longest phases in total, of those with the most repeated iterations."""
        found = self.recovered
        return max(found, key=lambda one: (one.replayed, sum(one.seconds.values())), default=None)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase on the slowest rank; includes the start of its process if it is new."""
        if self.slowest is None:
            return {}
        started = {event.rank: event.time for event in kind_of(self.events, WorkerStarted)}
        at = started.get(self.slowest.rank)
        return ({} if at is None else {PROCESS_START: at - self.start}) | self.slowest.seconds


class History:
    """A run, in the order of time.

    Args:
        events: events of all ranks, at least one, in the order of time.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            self.by_rank[event.rank].append(event)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.by_rank)

    @cached_property
    def begun(self) -> float:
        """Creation time of the first process, in seconds since the epoch."""
        created = (event.time - event.start_up_s for event in kind_of(self.events, WorkerStarted))
        return min(created, default=self.events[0].time)

    @property
    def end(self) -> float:
        return self.events[-1].time

    @property
    def finished(self) -> bool:
        return all(isinstance(self.by_rank[rank][-1], Finished) for rank in self.members)

    @cached_property
    def places(self) -> dict[int, Protected]:
        return self.newest(Protected)

    @property
    def about(self) -> JobDescribed | None:
        return next(reversed(kind_of(self.events, JobDescribed)), None)

    @cached_property
    def members(self) -> list[int]:
        """Ranks of the present layout with at least one event; an earlier one may have had more."""
        size = self.about.layout.get('ranks') if self.about else None
        return [rank for rank in self.ranks if size is None or rank < size]

    @cached_property
    def guests(self) -> str:
        """Number of nodes, and ranks that share another rank's first node; empty if none does."""
        moved = max((event.time for event in kind_of(self.events, Resharded)), default=0.0)
        starts = [one.time for one in kind_of(self.events, JobDescribed) if one.time <= moved]
        first: dict[int, Protected] = {}
        for event in kind_of(self.events, Protected):
            if event.time >= max(starts, default=0.0):  # in an earlier layout it had another node
                first.setdefault(event.rank, event)
        homes = {place.node for place in first.values()}
        nodes = {self.places[rank].node for rank in first}
        guests = [
            f'rank {rank} is a guest of {place.node} since {clock(place.time)}'
            for rank, place in sorted(self.places.items())
            if rank in first and place.node in homes - {first[rank].node}
        ]
        if not guests or len(nodes) >= len(homes):
            return ''
        return '; '.join([f'{len(nodes)} of {len(homes)} nodes', *guests])

    @property
    def layouts(self) -> list[str]:
        """Ranks by kind of parallelism of the present layout, if known; then the earlier ones."""
        if self.about is None:
            return []
        sizes = ', '.join(f'{kind} {size}' for kind, size in self.about.layout.items())
        resharded = kind_of(self.events, Resharded)
        earlier = (f'{one.was} up to iteration {one.dense_at}' for one in reversed(resharded))
        return [sizes, *dict.fromkeys(earlier)]

    def by_stage(self, ranks: Iterable[int]) -> list[tuple[int | None, list[int]]]:
        """Ranks of each pipeline stage; first those whose stage is unknown, if any."""
        stages: dict[int | None, list[int]] = {}
        places = {event.rank: event for event in kind_of(self.events, Protected)}
        for rank in ranks:
            place = places.get(rank)
            stages.setdefault(place.stage if place else None, []).append(rank)
        return sorted(stages.items(), key=lambda item: -1 if item[0] is None else item[0])

    @property
    def losses(self) -> list[LossLogged]:
        return kind_of(self.events, LossLogged)

    @cached_property
    def spans(self) -> dict[int, list[Span]]:
        """Activity of each rank, from its first process on."""
        found = {}
        for rank in self.ranks:
            last = self.by_rank[rank][-1]
            lives = rank in self.members and not isinstance(last, Finished)
            found[rank] = activity.spans(self._turns[rank], self.end if lives else last.time)
        return found

    @cached_property
    def _turns(self) -> dict[int, list[tuple[float, Doing | None]]]:
        noticed = [event.time for event in kind_of(self.events, FailureDetected)]
        return {
            rank: activity.turns(self.by_rank[rank], noticed, self.window_s) for rank in self.ranks
        }

    @cached_property
    def doing(self) -> dict[int, Doing]:
        """Present activity of each rank; a rank that did not notice a failure has itself failed."""
        found = {rank: turns[-1][1] or Doing.TRAINING for rank, turns in self._turns.items()}
        last = self.episodes[-1] if self.episodes else None
        if last is not None and last.end is None:
            gone = (rank for rank, events in self.by_rank.items() if events[-1].time < last.start)
            found |= dict.fromkeys(gone, Doing.STARTING)
        return found

    @cached_property
    def trained_from(self) -> float:
        """Time when the last rank was set up for the first time."""
        trained = (
            (span.start for span in self.spans[rank] if span.doing is Doing.TRAINING)
            for rank in self.members
        )
        return max(next(starts, self.end) for starts in trained)

    @cached_property
    def episodes(self) -> list[Episode]:
        """All failures, the oldest first."""
        stops = sorted(
            stop
            for spans in self.spans.values()
            for stop in activity.stops(spans)
            if stop[0] > self.trained_from
        )
        merged: list[list[float]] = []
        for start, end in stops:
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        for before, after in reversed(list(itertools.pairwise(merged))):
            if self._is_one(before, after):
                before[1] = after[1]
                merged.remove(after)
        found = []
        for start, end in merged:
            within = [event for event in self.events if start <= event.time <= end]
            lasts = end >= self.end and not self.finished
            found.append(Episode(start, None if lasts else end, within))
        return found

    def _is_one(self, before: Sequence[float], after: Sequence[float]) -> bool:
        """True if ranks report the same recovery in both periods, as clocks of hosts differ."""
        reports = [one for one in kind_of(self.events, Recovered) if one.target is not None]
        first, second = (
            {
                one.rank: (one.target, one.replacements)
                for one in reports
                if start <= one.time <= end
            }
            for start, end in (before, after)
        )
        same = any(report in first.values() for report in second.values())
        return same and not first.keys() & second.keys()

    @cached_property
    def planned(self) -> tuple[float, float]:
        """Seconds from planned stops to the next starts, and from those until all ranks trained."""
        whole = activity.together(list(self.spans.values()))
        paused = sum(after.start - before.end for before, after in itertools.pairwise(whole))
        starting = (
            sum(span.end - span.start for span in activity.restarts(spans))
            for spans in self.spans.values()
        )
        return paused, max(starting, default=0.0)

    @cached_property
    def progress(self) -> dict[int, list[Progress]]:
        return {rank: list(_progress(events)) for rank, events in self.by_rank.items()}

    @cached_property
    def pace(self) -> Pace | None:
        return Pace.of([piece for pieces in self.progress.values() for piece in pieces])

    @cached_property
    def window(self) -> int:
        """Slots of the newest window; 0 before the first."""
        return max(map(len, self.slots.values()), default=0)

    @cached_property
    def window_s(self) -> float:
        """Undisturbed seconds from one window to the next; 0 if unknown."""
        return 0.0 if self.pace is None else self.window * self.pace.iteration_s

    @property
    def iteration(self) -> int:
        """Newest committed iteration that no rollback has lost."""
        newest = {event.rank: event.iteration for event in self.events if event.iteration}
        return max(newest.values(), default=0)  # a new process reports 0 until it has recovered

    @property
    def of_iterations(self) -> str:
        target = self.about.train_iterations if self.about else None
        return str(self.iteration) if target is None else f'{self.iteration} of {target}'

    @cached_property
    def kept(self) -> int:
        """Number of different iterations trained since the run began."""
        starts = (event.start for event in kind_of(self.events, WindowCommitted))
        return self.iteration - min(starts, default=self.iteration)

    @property
    def mtbf_s(self) -> float | None:
        """Mean seconds between failures; None without a failure."""
        count = len(self.episodes)
        return (self.end - self.trained_from - self.planned[0]) / count if count else None

    def newest[E: Event](self, kind: type[E]) -> dict[int, E]:
        """Newest event of each rank of the present layout."""
        members = set(self.members)
        return {event.rank: event for event in kind_of(self.events, kind) if event.rank in members}

    @cached_property
    def slots(self) -> dict[int, list[int]]:
        """Bytes of each slot of the newest window, by rank."""
        return {rank: event.slots for rank, event in self.newest(WindowCommitted).items()}

    @cached_property
    def persisting_s(self) -> list[float]:
        """Seconds from a window's last slot until all ranks and holders have it, for all ranks."""
        committed: dict[tuple[int, int, str], float] = {}
        found = []
        for event in self.events:
            if isinstance(event, WindowCommitted):
                committed[event.pid, event.start, event.plan] = event.time
            elif isinstance(event, WindowPersisted):
                began = committed.pop((event.pid, event.start, event.plan), None)
                found += [] if began is None else [event.time - began]
        return found

    @property
    def newest_window(self) -> int | None:
        """Start of the newest window that all ranks know to be persisted; None without one."""
        known = self.newest(WindowPersisted)
        if known.keys() != set(self.members):
            return None
        start = min(event.start for event in known.values())
        return start if start <= self.iteration else None  # the job has restarted before the window

    @property
    def replans(self) -> int:
        """Number of times that windows were replanned."""
        return max((event.version for event in self.newest(Replanned).values()), default=0)

    @property
    def reduced(self) -> list[ProtectionReduced]:
        return kind_of(self.events, ProtectionReduced)

    @property
    def slow(self) -> list[SlowRank]:
        """What was said last of each rank that is slow now, the slowest first."""
        newest: dict[int, SlowRank] = {}
        for event in self.events:
            if isinstance(event, SlowRank):
                newest[event.slow] = event
            elif isinstance(event, WorkerStarted):
                newest.pop(event.rank, None)
                if event.rank == 0:  # which judges, and starts anew
                    newest.clear()
        slow = (event for event in newest.values() if event.iterations)
        return sorted(slow, key=lambda event: -event.ratio)

    @property
    def work(self) -> dict[int, dict[str, float]]:
        """Shares of each rank's training time: `own` work, and waits by the rank waited for."""
        return {
            rank: {name: seconds / one.training_s for name, seconds in parts.items()}
            for rank, one in self.newest(WindowCommitted).items()
            if (parts := {'own': one.own_s, **one.waits_s}) and one.training_s
        }


class Shares(NamedTuple):
    """Use of the wall time of a run, in seconds."""

    useful: float
    """Kept iterations, without the delays by sparse checkpointing."""
    exposed: float
    """Delays of kept iterations by sparse checkpointing."""
    recovering: float
    """From each failure until all ranks trained again."""
    starting: float
    """Until all ranks were set up, also after planned stops; the time between does not count."""
    other: float
    """The rest: evaluation, dense saves, iterations that were not kept."""

    @property
    def wall(self) -> float:
        return sum(self)

    @property
    def ettr(self) -> float:
        return self.useful / self.wall


def shares(history: History) -> Shares | None:
    """Shares of the wall time; None if the events have no iteration times."""
    pace = history.pace
    if pace is None:
        return None
    recovering = sum(one.away_s(history.end) for one in history.episodes)
    paused, restarting = history.planned
    starting = history.trained_from - history.begun + restarting
    training = history.kept * pace.iteration_s
    exposed = history.kept * pace.exposed_s
    other = history.end - history.begun - paused - training - recovering - starting
    return Shares(training - exposed, exposed, recovering, starting, max(other, 0.0))


def _progress(events: Iterable[Event]) -> Iterator[Progress]:
    """Progress of one rank between consecutive windows without other events."""
    before: WindowCommitted | None = None
    for event in events:
        if isinstance(event, WindowCommitted):
            if before is not None and before.pid == event.pid:
                iterations = event.iteration - before.iteration
                training_s = event.training_s - before.training_s
                exposed_s = event.exposed_s - before.exposed_s
                if iterations > 0:
                    yield Progress(event.time, iterations, training_s, exposed_s)
            before = event
        elif isinstance(event, FailureDetected | RecoveryStarted | RecoveryPhase | Recovered):
            before = None


def read_history(folder: Path) -> History:
    events = Follower(folder).read_new()
    if not events:
        raise LabError(
            f'{folder}: there are no events (rank<N>.jsonl) in it; give the folder of '
            '--sparse-ckpt-events'
        )
    return History(events)
