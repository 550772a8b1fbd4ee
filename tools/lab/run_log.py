# SPDX-License-Identifier: Apache-2.0
"""The only parser of training logs: upstream's lines and those of sparse checkpointing."""

import itertools
import math
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from .programs import LabError

_ITERATION = re.compile(
    r'\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] iteration +(?P<iteration>\d+)/ *\d+ \|'
    r'.*elapsed time per iteration \(ms\): (?P<elapsed>[\d.]+) \|'
    r'.*lm loss: (?P<loss>[\d.E+-]+) \|'
)
_CAPTURED = re.compile(
    r' sparse ckpt \| window: (?P<window>\d+) \| (?:interval: (?P<interval>\d+) \| )?'
    r'slot bytes: (?P<bytes>\d+) \| '
    r'exposed \(ms\): (?P<exposed>[\d.]+) \|'
)
_CONVERTED = ' sparse ckpt | converted window: '
_VALIDATED = re.compile(
    r'validation loss at iteration (?P<iteration>\d+) \| lm loss value: (?P<loss>[\d.E+-]+) \|'
)


class Iteration(NamedTuple):
    """One trained iteration, as the trainer logged it."""

    time: float
    """Time of the log line, in seconds since the epoch."""
    number: int
    elapsed_ms: float
    loss: float


class Captured(NamedTuple):
    """Capture of the logging rank in one iteration."""

    iteration: int
    window: int
    nbytes: int
    exposed_ms: float
    """Milliseconds for which training waited for the capture."""
    interval: int | None = None
    """Iterations from one window to the next; None: windows follow each other without a gap."""


@dataclass(frozen=True)
class RunLog:
    """Contents of a log; a job that was restarted has several attempts."""

    attempts: list[list[Iteration]]
    captured: list[Captured]
    validated: dict[int, float] = field(default_factory=dict)
    """Validation loss by iteration; the newest one if it was computed again."""

    @property
    def iterations(self) -> list[Iteration]:
        return [iteration for attempt in self.attempts for iteration in attempt]

    def wall_seconds(self, after: int, until: float = math.inf) -> list[float]:
        """Seconds of the iterations beyond one number and up to another, with the stalls of saves.

        An iteration lasts from the previous line to its own, so the first one does not count.
        """
        return [
            one.time - before.time
            for before, one in itertools.pairwise(self.iterations)
            if after < one.number <= until
        ]

    def newest_until(self, time: float) -> int:
        """Highest number logged up to a time (seconds since the epoch); 0 without one."""
        return max((item.number for item in self.iterations if item.time <= time), default=0)

    def first_after(self, number: int) -> Iteration:
        """First logged iteration beyond `number`; raises `LabError` if there is none."""
        for item in self.iterations:
            if item.number > number:
                return item
        raise LabError(f'the job never got beyond iteration {number}')

    def resumed(self, time: float) -> Iteration:
        """First iteration not logged by a time (since the epoch); `LabError` if there is none."""
        return self.first_after(self.newest_until(time))


def parse_log(text: str) -> RunLog:
    """Parse upstream's lines and those of sparse checkpointing.

    A new attempt of the job begins after a conversion, and where the iteration number decreases.
    """
    attempts: list[list[Iteration]] = []
    captured: list[Captured] = []
    validated: dict[int, float] = {}
    restarted = True
    for line in text.splitlines():
        if found := _ITERATION.search(line):
            iteration = Iteration(
                datetime.fromisoformat(found['time']).timestamp(),
                int(found['iteration']),
                float(found['elapsed']),
                float(found['loss']),
            )
            if restarted or iteration.number <= attempts[-1][-1].number:
                attempts.append([])
            attempts[-1].append(iteration)
            restarted = False
        elif attempts and (found := _CAPTURED.search(line)):
            captured.append(
                Captured(
                    attempts[-1][-1].number,
                    int(found['window']),
                    int(found['bytes']) // int(found['interval'] or 1),
                    float(found['exposed']),
                    int(found['interval']) if found['interval'] else None,
                )
            )
        elif found := _VALIDATED.search(line):
            validated[int(found['iteration'])] = float(found['loss'])
        elif _CONVERTED in line:
            restarted = True
    return RunLog(attempts, captured, validated)
