# SPDX-License-Identifier: Apache-2.0
"""What a job left behind after a fault, from its events and its log: is it back, how, and where?"""

import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from moevement_ext.events import (
    Event,
    FailureDetected,
    NextTier,
    Protected,
    Recovered,
    RecoveryPhase,
    RecoveryStarted,
    WindowPersisted,
    WorkerStarted,
    decode,
)
from tools.lab.run_log import Iteration

_LIFE = (WorkerStarted, FailureDetected, RecoveryStarted, NextTier, Recovered)
_WHOLE_JOB = 'the whole job'
_POST_STEP = 'post-step'


def read_events(folder: Path) -> list[Event]:
    """All complete events of a run in the order of time."""
    paths = sorted(folder.glob('rank*.jsonl'))
    found = [event for path in paths for event in decode(path.read_bytes())]
    return sorted(found, key=lambda event: event.time)


def kind_of[E: Event](events: Iterable[Event], kind: type[E]) -> list[E]:
    """The events of one kind, in their order."""
    return [event for event in events if isinstance(event, kind)]


def ranks_with(events: Iterable[Event], kind: type[Event]) -> set[int]:
    """Ranks that wrote an event of a kind."""
    return {event.rank for event in kind_of(events, kind)}


def recovers_locally(events: Iterable[Event]) -> bool:
    """Whether a stage of the job can replay alone: only then does it log what it sends."""
    return any(event.host_memory['log_ring'] for event in kind_of(events, Protected))


class Tier(enum.StrEnum):
    """How a job came back."""

    LOCALIZED = 'localized'
    """Survivors kept their state."""
    WHOLE_JOB = 'whole_job'
    """All workers were started again and recovered from host memory."""
    DISK = 'disk'
    """Host memory did not help: from a dense checkpoint, or from the start."""


class Recovery(NamedTuple):
    """A job that is back after a fault."""

    tier: Tier
    at: float
    """Seconds since the epoch at which the last rank was back."""
    target: int
    """Committed iteration from which it goes on."""
    replayed: int
    """Iterations that were computed again, on the ranks that did."""
    died: int
    """Workers that were started since the fault."""


def recovery(
    events: Sequence[Event], pids: Sequence[int], since: float, iterations: Sequence[Iteration]
) -> Recovery | None:
    """How the job came back, None if it is not back yet.

    Args:
        events: of all ranks, in the order of time.
        pids: of the present workers, by rank.
        since: seconds since the epoch of the last fault.
        iterations: that the last rank has logged in all its lives.
    """
    recent = [event for event in events if event.time > since]
    newest = {event.rank: event for event in recent if isinstance(event, _LIFE)}
    if any(rank not in newest or newest[rank].pid != pid for rank, pid in enumerate(pids)):
        return None
    last = max(newest.values(), key=lambda event: event.time)
    died = len(kind_of(recent, WorkerStarted))
    back = kind_of(newest.values(), Recovered)
    if len(back) == len(newest):
        return _recovered(events, recent, back, died)
    if any(isinstance(event, (Recovered, RecoveryStarted)) for event in newest.values()):
        return None
    later = [iteration for iteration in iterations if iteration.time > last.time]
    if died < len(pids) or not later:  # whoever lives on will report its recovery
        return None
    return Recovery(Tier.DISK, later[0].time, later[0].number - 1, 0, died)


def _recovered(
    events: Sequence[Event], recent: Sequence[Event], back: Sequence[Recovered], died: int
) -> Recovery:
    """The recovery that the newest report of each rank tells of, after so many deaths."""
    last = max(back, key=lambda event: event.time)
    localized = all(event.localized for event in back)
    tiers = {event.tier for event in kind_of(recent, NextTier)}
    tier = Tier.DISK if tiers - {_WHOLE_JOB} else Tier.LOCALIZED
    if tier is Tier.LOCALIZED and (tiers or not localized):
        tier = Tier.WHOLE_JOB
    replayed = max(event.replayed for event in back)
    target = last.target if localized else _caught_up_to(events, last)
    assert isinstance(target, int)  # of a localized recovery it is always set
    return Recovery(tier, last.time, target, replayed, died)


def _caught_up_to(events: Sequence[Event], last: Recovered) -> int:
    """Where the replay of a restarted worker ended."""
    starts = [event.start for event in kind_of(events, RecoveryStarted) if event.pid == last.pid]
    return starts[-1] + last.replayed


def start_up_s(events: Iterable[Event], since: float) -> float:
    """Seconds that the slowest process created since a time took until its program ran."""
    started = (event for event in kind_of(events, WorkerStarted) if event.time > since)
    new = (event for event in started if event.time - event.start_up_s > since)  # not a spare
    return max((event.start_up_s for event in new), default=0.0)


def done_again_s(events: Iterable[Event], since: float) -> float:
    """Seconds of the evaluations and dense saves that a failure cut off, on the slowest rank."""
    began: dict[int, float] = {}
    longest = 0.0
    for event in (event for event in events if event.time > since):
        if isinstance(event, RecoveryPhase) and event.phase == _POST_STEP:
            began[event.pid] = event.time
        elif isinstance(event, Recovered) and event.pid in began:
            longest = max(longest, event.time - began.pop(event.pid))
    return longest


def launch_s(events: Iterable[Event], iterations: Sequence[Iteration]) -> float:
    """Seconds from the creation of a job's first process to its first iteration."""
    created = min(event.time - event.start_up_s for event in kind_of(events, WorkerStarted))
    return iterations[0].time - created


def persisted(events: Iterable[Event], pids: Sequence[int], since: float) -> bool:
    """Whether all ranks know of a window that was persisted since a time."""
    known = {event.pid for event in kind_of(events, WindowPersisted) if event.time > since}
    return bool(pids) and known.issuperset(pids)


def lost_iterations(
    found: Recovery, iterations: Sequence[Iteration], events: Iterable[Event]
) -> int:
    """Iterations that the job had committed before a recovery and trains again after it.

    An iteration counts as committed when the last rank has logged it. What is replayed to come back
    to `found.target` is not lost: a replay is part of the recovery, over before training goes on.
    Nor is what is trained again after a dense checkpoint that was newer than the newest window:
    from that window it would have been replayed.

    Args:
        found: the recovery.
        iterations: that the last rank has logged in all its lives.
        events: of all ranks.
    """
    windows = [event for event in kind_of(events, WindowPersisted) if event.time <= found.at]
    if found.tier is Tier.DISK and found.target > 0 and windows:
        if found.target >= max(window.start for window in windows):
            return 0
    before = [iteration.number for iteration in iterations if iteration.time <= found.at]
    return max(0, max(before, default=0) - found.target)
