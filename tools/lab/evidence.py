# SPDX-License-Identifier: Apache-2.0
"""Evaluates a recovery from a job's events and log: whether, how and when the job recovered."""

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moevement_ext.events import (
    Event,
    FailureDetected,
    NextTier,
    Protected,
    Recovered,
    RecoveryStarted,
    WindowPersisted,
    WorkerStarted,
)

from .run_log import Iteration

_ATTEMPT = (WorkerStarted, FailureDetected, RecoveryStarted, NextTier, Recovered)
_WHOLE_JOB = 'the whole job'


def kind_of[E: Event](events: Iterable[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def recovers_locally(events: Iterable[Event]) -> bool:
    """True if a stage of the job can replay alone: only then does it log the tensors it sends."""
    return any(event.host_memory['log_ring'] for event in kind_of(events, Protected))


class Tier(enum.StrEnum):
    """Kind of a recovery."""

    LOCALIZED = 'localized'
    """Survivors kept their state."""
    WHOLE_JOB = 'whole_job'
    """All workers restarted and recovered from host memory."""
    DISK = 'disk'
    """Host memory was not sufficient: recovery used a dense checkpoint, or started over."""


class Recovery(NamedTuple):
    """A completed recovery."""

    tier: Tier
    at: float
    """Time when the last rank had recovered, in seconds since the epoch."""
    target: int
    """Committed iteration that training continues from."""
    replayed: int
    """Iterations computed again, on the ranks that replayed."""
    died: int
    """Number of workers started since the fault."""


def recovery(
    events: Sequence[Event], pids: Sequence[int], since: float, iterations: Sequence[Iteration]
) -> Recovery | None:
    """The completed recovery; None if the job has not recovered yet.

    Args:
        events: events of all ranks, in the order of time.
        pids: process ids of the present workers, by rank.
        since: time of the last fault, in seconds since the epoch.
        iterations: all iterations in the log of the last rank, over all its processes.
    """
    recent = [event for event in events if event.time > since]
    newest = {event.rank: event for event in recent if isinstance(event, _ATTEMPT)}
    if any(rank not in newest or newest[rank].pid != pid for rank, pid in enumerate(pids)):
        return None
    if not newest:  # an unprotected job has no events
        return None
    last = max(newest.values(), key=lambda event: event.time)
    died = len(kind_of(recent, WorkerStarted))
    back = kind_of(newest.values(), Recovered)
    if len(back) == len(newest):
        return _recovered(events, recent, back, died)
    if any(isinstance(event, (Recovered, RecoveryStarted)) for event in newest.values()):
        return None
    later = [iteration for iteration in iterations if iteration.time > last.time]
    if died < len(pids) or not later:  # any survivor would report its recovery
        return None
    return Recovery(Tier.DISK, later[0].time, later[0].number - 1, 0, died)


def _recovered(
    events: Sequence[Event], recent: Sequence[Event], back: Sequence[Recovered], died: int
) -> Recovery:
    """The recovery in the newest reports of all ranks."""
    last = max(back, key=lambda event: event.time)
    localized = all(event.localized for event in back)
    tiers = {event.tier for event in kind_of(recent, NextTier)}
    tier = Tier.DISK if tiers - {_WHOLE_JOB} else Tier.LOCALIZED
    if tier is Tier.LOCALIZED and (tiers or not localized):
        tier = Tier.WHOLE_JOB
    target = last.target
    if not localized:  # where the replay of a restarted worker ended
        starts = [one.start for one in kind_of(events, RecoveryStarted) if one.pid == last.pid]
        target = starts[-1] + last.replayed
    assert isinstance(target, int)  # a localized recovery always sets it
    return Recovery(tier, last.time, target, max(event.replayed for event in back), died)


def persisted(events: Iterable[Event], pids: Sequence[int], since: float) -> bool:
    """True if all ranks know of a window that was persisted since a time."""
    known = {event.pid for event in kind_of(events, WindowPersisted) if event.time > since}
    return bool(pids) and known.issuperset(pids)


def lost_iterations(
    found: Recovery, iterations: Sequence[Iteration], events: Iterable[Event]
) -> int:
    """Number of iterations that were committed before a recovery and are trained again after it.

    An iteration counts as committed once the last rank has logged it. Iterations replayed to reach
    `found.target` are not lost: the replay is a part of the recovery and ends before training
    continues. Nor are iterations after a dense checkpoint newer than the newest window: a recovery
    from that window would have replayed them.
    """
    windows = [event for event in kind_of(events, WindowPersisted) if event.time <= found.at]
    if found.tier is Tier.DISK and found.target > 0 and windows:
        if found.target >= max(window.start for window in windows):
            return 0
    before = [iteration.number for iteration in iterations if iteration.time <= found.at]
    return max(0, max(before, default=0) - found.target)


def problems(
    events: Sequence[Event], ranks: int, failures: int, differ: Sequence[str]
) -> list[str]:
    """Reasons why a job did not come back from its failures as it should; empty if it did.

    `differ`: kinds of state that differ from the state of a job without failures.
    """
    found = [f'the final state differs from the undisturbed one: {" ".join(differ)}'] * bool(differ)
    reports = kind_of(events, Recovered)
    counts = [sum(event.rank == rank for event in reports) for rank in range(ranks)]
    if min(counts, default=0) < failures or len(set(counts)) > 1:
        found.append(f'{failures} failures were staged; recoveries by rank: {counts}')
    wrong = [f'rank {event.rank}: {name}' for event in reports for name in event.differing]
    if wrong:
        found.append(f'{len(wrong)} recovered operators differ, such as {wrong[0]}')
    tiers = sorted({f'{event.tier}: {event.reason}' for event in kind_of(events, NextTier)})
    return found + [f'it went on from {tier}' for tier in tiers]
