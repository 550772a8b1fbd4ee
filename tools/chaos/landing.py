# SPDX-License-Identifier: Apache-2.0
"""Finds in the events where a fault landed, and tabulates the coverage."""

import enum
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from moevement_ext.events import Event, RecoveryPhase
from tools.lab.evidence import kind_of
from tools.lab.job import Kind
from tools.lab.tables import table

ALL = 'all'
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


RECOVERY = tuple(Phase)[2:]
"""Phases that a second fault can aim at."""


class Cell(NamedTuple):
    """A cell of the table of coverage: a kind of fault in a phase."""

    phase: Phase
    kind: Kind

    def __str__(self) -> str:
        return f'{self.phase} x {self.kind}'


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


def parse_cells(text: str) -> list[Cell]:
    """Cells of `phases:kinds`, each a list with commas, or `all`; none for an empty text.

    Raises:
        ValueError: the text is malformed; the message says why.
    """
    if not text:
        return []
    phases, colon, kinds = text.partition(':')
    if not colon:
        raise ValueError(f'{text!r}: must be phases:kinds, such as {ALL}:kill,node')
    return [
        Cell(Phase(phase), Kind(kind))
        for kind in _names(kinds, tuple(Kind))
        for phase in _names(phases, RECOVERY)
    ]


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = list(known) if text == ALL else text.split(',')
    for name in names:
        if name not in known:
            raise ValueError(f'{name!r}: must be {ALL} or some of {",".join(known)}')
    return names


class Coverage:
    """Numbers of faults of each kind that landed in each phase; no `asked` cell may stay empty."""

    def __init__(self, asked: Sequence[Cell]) -> None:
        self.asked = list(asked)
        self._landed: Counter[Cell] = Counter()
        self._aimed: Counter[Cell] = Counter()

    def aim(self, kinds: Sequence[Kind]) -> Cell | None:
        """The next cell to aim at: among the cells least often hit, the one least often tried."""
        possible = [cell for cell in self.asked if cell.kind in kinds]
        if not possible:
            return None
        cell = min(possible, key=lambda cell: (self._landed[cell], self._aimed[cell]))
        self._aimed[cell] += 1
        return cell

    def add(self, cells: Sequence[Cell]) -> None:
        self._landed.update(cells)

    def empty(self) -> list[Cell]:
        """Required cells that were never hit."""
        return [cell for cell in self.asked if not self._landed[cell]]

    def table(self) -> Table:
        """Phase x kind, with the number of faults; empty required cells are highlighted."""
        empty = set(self.empty())

        def count(cell: Cell) -> str:
            return '[bold red]0[/]' if cell in empty else str(self._landed[cell] or '')

        columns = ('phase', *(f'>{kind}' for kind in Kind))
        rows = ((phase, *(count(Cell(phase, kind)) for kind in Kind)) for phase in Phase)
        return table(columns, rows, title='faults by the phase in which they landed')
