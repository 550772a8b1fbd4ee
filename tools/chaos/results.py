# SPDX-License-Identifier: Apache-2.0
"""Results of a campaign: one line of JSON for each job, written when the job is over."""

from collections import Counter
from pathlib import Path

import msgspec

from ..lab.evidence import Tier

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
    iteration: int
    tier: Tier
    replayed: int
    lost: int
    seconds: float
    """Seconds from the last injection until all ranks have recovered."""


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

    def summary(self) -> str:
        counts = Counter(fault.tier for fault in self.faults)
        identical = all(job.identical for job in self.jobs)
        return (
            f'chaos: faults={counts.total()} {" ".join(f"{tier}={counts[tier]}" for tier in Tier)} '
            f'lost_iterations={sum(fault.lost for fault in self.faults)} '
            f'bit_identical={str(identical).lower()} '
            f'survivors_lost={sum(len(job.survivors_lost) for job in self.jobs)}'
        )
