# SPDX-License-Identifier: Apache-2.0
"""What a campaign has found so far: one line of JSON for each job, written when the job is over."""

from pathlib import Path

import msgspec

from tools.chaos.landing import Cell, Coverage
from tools.lab.evidence import Tier

NAME = 'campaign.jsonl'


class Begun(msgspec.Struct, frozen=True, tag='begun'):
    """The first line: what was asked for."""

    arguments: list[str]
    seed: int


class Refused(msgspec.Struct, frozen=True, tag='refused'):
    """Plain Megatron did not run with a configuration, which is drawn again."""

    configuration: int
    what: str
    reason: str


class FaultRecord(msgspec.Struct, frozen=True):
    """One fault."""

    fault: str
    cells: list[Cell]
    """Where the injections landed."""
    iteration: int
    """The last one logged before the fault."""
    tier: Tier
    replayed: int
    lost: int
    seconds: float
    """From the last injection until all ranks were back."""
    stall_s: float
    """`seconds` without the time after which a worker is declared hung, and without starting: of
    the processes that had to be created, or of all, as long as the first start of the job took.
    Evaluations and dense saves that are done again do not count as far as they always take."""


class JobDone(msgspec.Struct, frozen=True, tag='job'):
    """One job, to its end."""

    number: int
    configuration: int
    what: str
    faults: list[FaultRecord] = msgspec.field(name='struck')
    identical: bool
    """The final state is that of plain Megatron, bit for bit."""
    survivors_lost: list[str]
    """Workers that ended otherwise than well without a fault."""
    failed: str = ''
    """Why the job did not come to its end."""


Line = Begun | Refused | JobDone


class ResultError(Exception):
    """A file of results that cannot be gone on with; the message says why."""


class Results:
    """Results of a campaign, in memory and in a file.

    Args:
        path: of the file; what it holds already counts.

    Raises:
        ResultError: it is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[Line] = []
        if path.exists():
            decoder = msgspec.json.Decoder(Line)
            try:
                # A line that was cut off was not yet counted: its job is done again.
                whole = [line for line in path.read_bytes().splitlines(True) if line[-1:] == b'\n']
                self._lines = [decoder.decode(line) for line in whole]
            except msgspec.MsgspecError as error:
                raise ResultError(f'{path}: no results of a campaign: {error}') from error
            path.write_bytes(b''.join(whole))

    def add(self, line: Line) -> None:
        """Note something, for good."""
        self._lines.append(line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open('ab') as file:
            file.write(msgspec.json.encode(line) + b'\n')

    def begun(self) -> Begun:
        """What was asked for.

        Raises:
            ResultError: the file does not begin with it.
        """
        if not self._lines or not isinstance(self._lines[0], Begun):
            raise ResultError(f'{self._path}: there is no campaign to resume')
        return self._lines[0]

    @property
    def jobs(self) -> list[JobDone]:
        """That are over, in order."""
        return [line for line in self._lines if isinstance(line, JobDone)]

    def refusals(self, configuration: int) -> int:
        """How often a configuration was refused."""
        return sum(
            isinstance(line, Refused) and line.configuration == configuration
            for line in self._lines
        )

    @property
    def faults(self) -> list[FaultRecord]:
        """All faults of all jobs."""
        return [fault for job in self.jobs for fault in job.faults]

    @property
    def identical(self) -> bool:
        """Whether every job ended in the right bits."""
        return all(job.identical for job in self.jobs)

    @property
    def failed(self) -> list[JobDone]:
        """Jobs that did not come to their end."""
        return [job for job in self.jobs if job.failed]

    @property
    def survivors_lost(self) -> int:
        """Workers that ended otherwise than well without a fault."""
        return sum(len(job.survivors_lost) for job in self.jobs)

    @property
    def lost_iterations(self) -> int:
        """Committed, but trained again."""
        return sum(fault.lost for fault in self.faults)

    @property
    def longest_stall_s(self) -> float:
        """From a fault until all were back, without detecting hangs and starting processes."""
        return max((fault.stall_s for fault in self.faults), default=0.0)

    def count(self, coverage: Coverage) -> None:
        """Tell a new table of all that has landed."""
        for fault in self.faults:
            coverage.add(fault.cells)

    def summary(self, coverage: Coverage) -> str:
        """The last line, for programs."""
        tiers = [fault.tier for fault in self.faults]
        counts = ' '.join(f'{tier}={tiers.count(tier)}' for tier in Tier)
        covered = len(coverage.asked) - len(coverage.empty())
        return (
            f'chaos: faults={len(tiers)} {counts} lost_iterations={self.lost_iterations} '
            f'bit_identical={str(self.identical).lower()} '
            f'phases_covered={covered}/{len(coverage.asked)} survivors_lost={self.survivors_lost}'
        )
