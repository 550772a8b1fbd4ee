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
    own = [event for event in named if event.pid == pid and event.time >= (first or 0.0)]
    others = [event for event in named if first is not None and first <= event.time <= at]
    newest = (own or others)[-1:]
    if not newest:
        return Phase.TRAINING if first is None else Phase.UNNOTICED
    return Phase.TRAINING if newest[0].phase == _OVER else Phase(newest[0].phase)


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


class Results:
    """Results of a campaign, in memory and in a file, whose existing lines count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        decode = msgspec.json.Decoder(Begun | Refused | JobDone).decode_lines
        self._lines = decode(path.read_bytes()) if path.exists() else []

    def add(self, line: Begun | Refused | JobDone) -> None:
        self._lines.append(line)
        with self._path.open('ab') as file:
            file.write(msgspec.json.encode(line) + b'\n')

    def _of[L](self, kind: type[L]) -> list[L]:
        return [line for line in self._lines if isinstance(line, kind)]

    @property
    def begun(self) -> Begun:
        return self._of(Begun)[0]

    @property
    def jobs(self) -> list[JobDone]:
        return self._of(JobDone)

    def refusals(self, configuration: int) -> int:
        return sum(line.configuration == configuration for line in self._of(Refused))

    @property
    def faults(self) -> list[FaultRecord]:
        return [fault for job in self.jobs for fault in job.faults]

    @property
    def failed(self) -> list[JobDone]:
        return [job for job in self.jobs if job.failed]

    @property
    def sound(self) -> bool:
        """Nothing was lost, and all final states are equal."""
        return all(job.identical and not job.survivors_lost for job in self.jobs) and not any(
            fault.lost for fault in self.faults
        )

    @property
    def longest_stall_s(self) -> float:
        return max((fault.stall_s for fault in self.faults), default=0.0)

    def summary(self) -> str:
        counts = Counter(fault.tier for fault in self.faults)
        identical = all(job.identical for job in self.jobs)
        return (
            f'chaos: faults={counts.total()} {" ".join(f"{tier}={counts[tier]}" for tier in Tier)} '
            f'lost_iterations={sum(fault.lost for fault in self.faults)} '
            f'bit_identical={str(identical).lower()} '
            f'survivors_lost={sum(len(job.survivors_lost) for job in self.jobs)}'
        )
