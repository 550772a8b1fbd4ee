# SPDX-License-Identifier: Apache-2.0
"""What a job left behind after a fault, from its events and its log: is it back, how, and where?"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from tools.plot_run import Iteration

Events = Sequence[dict[str, Any]]

_LIFE = ('worker_started', 'failure_detected', 'recovery_started', 'next_tier', 'recovered')
_WHOLE_JOB = 'the whole job'


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
    events: Events, pids: Sequence[int], since: float, iterations: Sequence[Iteration]
) -> Recovery | None:
    """How the job came back, None if it is not back yet.

    Args:
        events: of all ranks, in the order of time.
        pids: of the present workers, by rank.
        since: seconds since the epoch of the last strike.
        iterations: that the last rank has logged in all its lives.
    """
    recent = [event for event in events if event['time'] > since]
    newest = _newest_of_life(recent)
    if any(rank not in newest or newest[rank]['pid'] != pid for rank, pid in enumerate(pids)):
        return None
    last = max(newest.values(), key=lambda event: event['time'])
    died = sum(event['event'] == 'worker_started' for event in recent)
    if all(event['event'] == 'recovered' for event in newest.values()):
        localized = all(event.get('scope') == Tier.LOCALIZED for event in newest.values())
        target = last['target'] if localized else _caught_up_to(events, last)
        replayed = max(event['replayed'] for event in newest.values())
        tiers = {event['tier'] for event in recent if event['event'] == 'next_tier'}
        tier = Tier.DISK if tiers - {_WHOLE_JOB} else Tier.LOCALIZED
        if tier is Tier.LOCALIZED and (tiers or not localized):
            tier = Tier.WHOLE_JOB
        return Recovery(tier, last['time'], target, replayed, died)
    if any(event['event'] in ('recovered', 'recovery_started') for event in newest.values()):
        return None
    later = [iteration for iteration in iterations if iteration.time > last['time']]
    if died < len(pids) or not later:  # whoever lives on will report its recovery
        return None
    return Recovery(Tier.DISK, later[0].time, later[0].number - 1, 0, died)


def _caught_up_to(events: Events, recovered: dict[str, Any]) -> int:
    """Where the replay of a restarted worker ended."""
    starts = [
        event['start']
        for event in events
        if event['event'] == 'recovery_started' and event['pid'] == recovered['pid']
    ]
    return int(starts[-1] + recovered['replayed'])


def _newest_of_life(events: Events) -> dict[int, dict[str, Any]]:
    """The last event of each rank that says where it is in its life."""
    return {event['rank']: event for event in events if event['event'] in _LIFE}


def persisted(events: Events, pids: Sequence[int], since: float) -> bool:
    """Whether all ranks know of a window that was persisted since a time."""
    known = {
        event['pid']
        for event in events
        if event['event'] == 'window_persisted' and event['time'] > since
    }
    return bool(pids) and known.issuperset(pids)


def lost_iterations(found: Recovery, iterations: Sequence[Iteration]) -> int:
    """Iterations that the job had committed before a recovery and trains again after it.

    An iteration counts as committed when the last rank has logged it. What is replayed to come back
    to `found.target` is not lost: a replay is part of the recovery, over before training goes on.
    """
    before = [iteration.number for iteration in iterations if iteration.time <= found.at]
    return max(0, max(before, default=0) - found.target)
