# SPDX-License-Identifier: Apache-2.0
"""Results of a campaign: one line of JSON for each job, written when the job is over.

A fault counts in the phase of a recovery that it hit, according to the events.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.table import Table

from moevement_ext.events import Event, RecoveryPhase

from ..lab.evidence import Tier, kind_of
from ..lab.job import Kind
from ..lab.tables import table

_OVER = 'over'


class Phase(enum.StrEnum):
    """Phase of a recovery, named as in the events; or a time without a recovery."""

    TRAINING = 'training'
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
    counts = Counter(cells)
    columns = ('phase', *(f'>{kind}' for kind in Kind))
    rows = ((phase, *(str(counts[Cell(phase, kind)] or '') for kind in Kind)) for phase in Phase)
    return table(columns, rows, title='faults by the phase in which they landed')


NAME = 'campaign.jsonl'


class Begun(msgspec.Struct, frozen=True, tag='begun'):
    """The first line: the campaign's arguments."""

    arguments: list[str]
    seed: int


class Refused(msgspec.Struct, frozen=True, tag='refused'):
    """Plain Megatron refused a configuration, which is drawn again."""

    configuration: int
    what: str
    reason: str


class FaultRecord(msgspec.Struct, frozen=True):
    """One fault."""

    fault: str
    cells: list[Cell]
    iteration: int
    tier: Tier
    replayed: int
    lost: int
    seconds: float
    """Seconds from the last injection until all ranks have recovered."""
    stall_s: float
    """`seconds` without hang detection and without process starts (those of replacements, or of the
    whole job, estimated from its first start). Repeated evaluations and dense saves do not count,
    up to their usual duration."""


class JobDone(msgspec.Struct, frozen=True, tag='job'):
    """One job, run to its end."""

    number: int
    configuration: int
    what: str
    faults: list[FaultRecord] = msgspec.field(name='struck')
    identical: bool
    """The final state equals that of plain Megatron, bit for bit."""
    survivors_lost: list[str]
    """Workers that failed without a fault."""
    failed: str = ''


Line = Begun | Refused | JobDone


class Results:
    """Results of a campaign, in memory and in a file, whose existing lines count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        decode = msgspec.json.Decoder(Line).decode_lines
        self._lines: list[Line] = decode(path.read_bytes()) if path.exists() else []

    def add(self, line: Line) -> None:
        self._lines.append(line)
        with self._path.open('ab') as file:
            file.write(msgspec.json.encode(line) + b'\n')

    @property
    def begun(self) -> Begun:
        return next(line for line in self._lines if isinstance(line, Begun))

    @property
    def jobs(self) -> list[JobDone]:
        return [line for line in self._lines if isinstance(line, JobDone)]

    def refusals(self, configuration: int) -> int:
        return sum(
            isinstance(line, Refused) and line.configuration == configuration
            for line in self._lines
        )

    @property
    def faults(self) -> list[FaultRecord]:
        return [fault for job in self.jobs for fault in job.faults]

    @property
    def identical(self) -> bool:
        return all(job.identical for job in self.jobs)

    @property
    def failed(self) -> list[JobDone]:
        return [job for job in self.jobs if job.failed]

    @property
    def survivors_lost(self) -> int:
        return sum(len(job.survivors_lost) for job in self.jobs)

    @property
    def lost_iterations(self) -> int:
        """Number of committed iterations that were trained again."""
        return sum(fault.lost for fault in self.faults)

    @property
    def longest_stall_s(self) -> float:
        return max((fault.stall_s for fault in self.faults), default=0.0)

    def summary(self) -> str:
        tiers = [fault.tier for fault in self.faults]
        counts = ' '.join(f'{tier}={tiers.count(tier)}' for tier in Tier)
        return (
            f'chaos: faults={len(tiers)} {counts} lost_iterations={self.lost_iterations} '
            f'bit_identical={str(self.identical).lower()} survivors_lost={self.survivors_lost}'
        )
