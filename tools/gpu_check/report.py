# SPDX-License-Identifier: Apache-2.0
"""What the stages have found so far: one file, kept from one call to the next."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tools.lab.errors import LabError
from tools.lab.figures import write_json
from tools.lab.hardware import Hardware

NAME = 'gpu-check.json'


class Findings(msgspec.Struct, frozen=True):
    """What one stage, or a part of it, measured, and what is wrong."""

    figures: dict[str, Any]
    """Numbers, texts and tables of them; the summary shows those that are no tables."""
    problems: list[str]
    """One line each; none: the stage has passed."""
    done: bool = False
    """The stage, whose process may not live to finish, has nothing to add."""

    def and_then(self, more: 'Findings') -> 'Findings':
        """These, and what was found after them."""
        return Findings({**self.figures, **more.figures}, self.problems + more.problems)


NOTHING = Findings({}, [])


def together(parts: Iterable[Findings]) -> Findings:
    """All that a stage has found, when it is done."""
    found = NOTHING
    for part in parts:
        found = found.and_then(part)
    return found


class StageResult(msgspec.Struct, frozen=True):
    """The newest run of one stage."""

    passed: bool
    seconds: float
    figures: dict[str, Any]
    problems: list[str]

    def lines(self, name: str) -> list[str]:
        """For people: PASS or FAIL with the figures, and what is wrong."""
        shown = ' '.join(
            f'{key}={value:.4g}' if isinstance(value, float) else f'{key}={value}'
            for key, value in self.figures.items()
            if not isinstance(value, dict | list)
        )
        verdict = 'PASS' if self.passed else 'FAIL'
        return [
            f'{verdict} {name} ({self.seconds:.0f} s) {shown}'.rstrip(),
            *(f'     {problem}' for problem in self.problems),
        ]


class Report(msgspec.Struct, frozen=True):
    """Everything that was found on one machine."""

    hardware: Hardware
    dry_run: bool
    """On the CPU, over gloo, with a tiny model: it says nothing about a GPU."""
    stages: dict[str, StageResult]

    def with_stage(self, name: str, result: StageResult) -> 'Report':
        """This and the newest run of a stage."""
        return Report(self.hardware, self.dry_run, {**self.stages, name: result})

    def passed(self, name: str) -> bool:
        """Whether a stage has run and passed."""
        return name in self.stages and self.stages[name].passed


def load(output: Path, hardware: Hardware, dry_run: bool) -> Report:
    """What earlier calls have left in a folder, or nothing yet.

    Args:
        output: the folder.
        hardware: of this machine.
        dry_run: whether this is one.

    Raises:
        LabError: the file is damaged, or of another machine.
    """
    path = output / NAME
    if not path.exists():
        return Report(hardware, dry_run, {})
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.MsgspecError as error:
        raise LabError(f'{path} is damaged ({error}); remove it or give another --output') from None
    ours, theirs = (
        (one.gpu, one.processor, one.torch, dry)
        for one, dry in ((hardware, dry_run), (report.hardware, report.dry_run))
    )
    if ours != theirs:
        raise LabError(
            f'{path} has results of {"a dry run on " if report.dry_run else ""}'
            f'{report.hardware.line()}; give another --output'
        )
    return report


def save(output: Path, report: Report) -> None:
    """Write it for the next call, and for people."""
    write_json(output / NAME, report)
