# SPDX-License-Identifier: Apache-2.0
"""Where a fault really landed, out of the events, and the table of what was covered."""

import enum
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from moevement_ext.events import Event, RecoveryPhase
from tools.lab.evidence import kind_of
from tools.lab.job import Kind

ALL = 'all'
_OVER = 'over'


class Phase(enum.StrEnum):
    """Phase of a recovery, named as in the events; or a time at which there is none."""

    TRAINING = 'training'
    """No recovery was under way."""
    UNNOTICED = 'unnoticed'
    """After an earlier fault, before anybody had noticed it."""
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
"""Phases that a second fault can be aimed at."""


class Cell(NamedTuple):
    """A cell of the table of coverage: a kind of fault in a phase."""

    phase: Phase
    kind: Kind

    def __str__(self) -> str:
        return f'{self.phase} x {self.kind}'


def landed(events: Sequence[Event], first: float | None, at: float, pid: int) -> Phase:
    """In which phase a process was when a fault came to it.

    It is the last that the process itself has named in this recovery. One that has named none (it
    has not noticed yet, or still starts) was where the job was, by what the others had named.

    Args:
        events: of all ranks, in the order of time.
        first: when the fault came that is recovered from (seconds since the epoch), if any.
        at: when this one came.
        pid: of the process.
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
    """Cells of `phases:kinds`, each a list with commas, or `all`; none of an empty text.

    Raises:
        ValueError: what is wrong with it.
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
    """How often faults of each kind landed in each phase.

    Args:
        asked: cells that must not stay empty.
    """

    def __init__(self, asked: Sequence[Cell]) -> None:
        self.asked = list(asked)
        self._landed: Counter[Cell] = Counter()
        self._aimed: Counter[Cell] = Counter()

    def aim(self, kinds: Sequence[Kind]) -> Cell | None:
        """What to aim at next: of the cells least often hit, the one least often tried."""
        possible = [cell for cell in self.asked if cell.kind in kinds]
        if not possible:
            return None
        cell = min(possible, key=lambda cell: (self._landed[cell], self._aimed[cell]))
        self._aimed[cell] += 1
        return cell

    def add(self, cells: Sequence[Cell]) -> None:
        """Count faults that landed."""
        self._landed.update(cells)

    def empty(self) -> list[Cell]:
        """Cells that were asked for and never hit."""
        return [cell for cell in self.asked if not self._landed[cell]]

    def table(self) -> Table:
        """Phase x kind, with the number of faults; what is asked for and empty stands out."""
        table = Table(title='strikes by the phase in which they landed')
        table.add_column('phase')
        for kind in Kind:
            table.add_column(kind, justify='right')
        empty = set(self.empty())
        for phase in Phase:
            counts = []
            for kind in Kind:
                cell = Cell(phase, kind)
                counts.append('[bold red]0[/]' if cell in empty else str(self._landed[cell] or ''))
            table.add_row(phase, *counts)
        return table
