# SPDX-License-Identifier: Apache-2.0
"""The one reader of what training logs: upstream's lines and those of sparse checkpointing."""

import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from tools.lab.errors import LabError

_ITERATION = re.compile(
    r'\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] iteration +(?P<iteration>\d+)/ *\d+ \|'
    r'.*elapsed time per iteration \(ms\): (?P<elapsed>[\d.]+) \|'
    r'.*lm loss: (?P<loss>[\d.E+-]+) \|'
)
_CAPTURED = re.compile(
    r' sparse ckpt \| window: (?P<window>\d+) \| slot bytes: (?P<bytes>\d+) \| '
    r'exposed \(ms\): (?P<exposed>[\d.]+) \|'
)
_CONVERTED = ' sparse ckpt | converted window: '
_SAVED = re.compile(r'save-checkpoint \.+: \([\d.]+, (?P<ms>[\d.]+)\)')


class LogError(LabError):
    """A log that is of no use; the message names it and says what to do."""


class Iteration(NamedTuple):
    """One trained iteration, as the trainer logged it."""

    time: float
    """Seconds since the epoch at which it was logged."""
    number: int
    elapsed_ms: float
    loss: float


class Captured(NamedTuple):
    """What the logging rank captured in one iteration."""

    iteration: int
    window: int
    """Iterations per window at that time."""
    nbytes: int
    exposed_ms: float
    """Milliseconds for which training stood still for it."""


@dataclass(frozen=True)
class RunLog:
    """What a log says; a job that was restarted has several lives."""

    lives: list[list[Iteration]]
    captured: list[Captured]
    saved_ms: list[float] = field(default_factory=list)
    """Milliseconds of each dense checkpoint, on the rank that was slowest."""

    @property
    def iterations(self) -> list[Iteration]:
        """All trained iterations in the order of the log."""
        return [iteration for life in self.lives for iteration in life]

    def wall_seconds(self, warm_up: int) -> list[float]:
        """Seconds between the lines of consecutive iterations, hence with every stall of saving.

        Args:
            warm_up: how many of the first to drop; at least 1, for the first has no predecessor.
        """
        times = [iteration.time for iteration in self.iterations]
        seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
        return seconds[warm_up - 1 :]

    def first_after(self, number: int) -> Iteration | None:
        """The first logged iteration beyond `number`; None if the job never got there."""
        return next((item for item in self.iterations if item.number > number), None)


def parse_log(text: str) -> RunLog:
    """Read the lines of upstream's training log and those of sparse checkpointing.

    A new life of the job begins after a conversion, and where the iteration number falls back.
    """
    lives: list[list[Iteration]] = []
    captured: list[Captured] = []
    saved_ms: list[float] = []
    restarted = True
    for line in text.splitlines():
        if found := _ITERATION.search(line):
            iteration = Iteration(
                datetime.fromisoformat(found['time']).timestamp(),
                int(found['iteration']),
                float(found['elapsed']),
                float(found['loss']),
            )
            if restarted or iteration.number <= lives[-1][-1].number:
                lives.append([])
            lives[-1].append(iteration)
            restarted = False
        elif lives and (found := _CAPTURED.search(line)):
            captured.append(
                Captured(
                    lives[-1][-1].number,
                    int(found['window']),
                    int(found['bytes']),
                    float(found['exposed']),
                )
            )
        elif found := _SAVED.search(line):
            saved_ms.append(float(found['ms']))
        elif _CONVERTED in line:
            restarted = True
    return RunLog(lives, captured, saved_ms)


def read_log(path: Path) -> RunLog:
    """Read a log file.

    Raises:
        LogError: it cannot be read or holds no trained iteration.
    """
    try:
        log = parse_log(path.read_text('utf-8', errors='replace'))
    except OSError as error:
        raise LogError(f'{path}: {error.strerror}; give the log of a training run') from error
    if not log.lives:
        raise LogError(f'{path}: no trained iteration; run the trainer with --log-interval 1')
    return log
