# SPDX-License-Identifier: Apache-2.0
"""Finds in the events where a fault landed, and counts the phases."""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table

from moevement_ext.events import Event, RecoveryPhase

from ..lab.evidence import kind_of
from ..lab.job import Kind
from ..lab.tables import table

_OVER = 'over'


class Phase(enum.StrEnum):
    """Phase of a recovery, named as in the events; or a time without a recovery."""

    TRAINING = 'training'
    """No recovery was running."""
    UNNOTICED = 'unnoticed'
    """After an earlier fault, before any process has noticed it."""
    DETECT = 'detect'
    MEET = 'meet'
    RESPAWN = 'respawn'
    REGROUP = 'regroup'
    FETCH = 'fetch'
    CONVERT = 'convert'
    CATCH_UP = 'catch-up'
    POST_STEP = 'post-step'
    FIRST_ITERATION = 'first-iteration'


class Cell(NamedTuple):
    """A kind of fault in a phase."""

    phase: Phase
    kind: Kind


def landed(events: Sequence[Event], first: float | None, at: float, pid: int) -> Phase:
    """Phase of a process when a fault hit it.

    This is the last phase that the process itself reported in this recovery. If the process has
    reported none (it has not noticed yet, or is starting), the phase that the others reported
    counts.

    Args:
        events: events of all ranks, in the order of time.
        first: time of the fault that the job is recovering from (seconds since the epoch), if any.
        at: time of this fault.
        pid: id of the process.
    """
    named = kind_of(events, RecoveryPhase)
    own = [event for event in named if event.pid == pid]
    if own and own[-1].phase != _OVER and (first is None or own[-1].time >= first):
        return Phase(own[-1].phase)
    if first is None:
        return Phase.TRAINING
    if own and own[-1].time >= first:
        return Phase.TRAINING
    others = [event for event in named if first <= event.time <= at]
    if not others:
        return Phase.UNNOTICED
    newest = others[-1].phase
    return Phase.TRAINING if newest == _OVER else Phase(newest)


def landing_table(cells: Iterable[Cell]) -> Table:
    """Phase x kind, with the number of faults."""
    counts = Counter(cells)
    columns = ('phase', *(f'>{kind}' for kind in Kind))
    rows = ((phase, *(str(counts[Cell(phase, kind)] or '') for kind in Kind)) for phase in Phase)
    return table(columns, rows, title='faults by the phase in which they landed')
