# SPDX-License-Identifier: Apache-2.0
"""The findings of all stages so far: one file, kept between calls."""

from pathlib import Path
from typing import Any

import msgspec

from tools.lab.errors import LabError
from tools.lab.figures import write_json
from tools.lab.hardware import Hardware

NAME = 'gpu-check.json'


class Findings(msgspec.Struct, frozen=True):
    """Measurements and problems of a stage, or of a part of it."""

    figures: dict[str, Any]
    """Numbers, texts and tables of them; the summary shows all but tables."""
    problems: list[str]
    """One line each; empty if the stage has passed."""
    done: bool = False
    """The stage has nothing to add, even if its process dies before it finishes."""

    def and_then(self, more: 'Findings') -> 'Findings':
        return Findings({**self.figures, **more.figures}, self.problems + more.problems)


NOTHING = Findings({}, [])


class StageResult(msgspec.Struct, frozen=True):
    """Result of the newest run of one stage."""

    passed: bool
    seconds: float
    figures: dict[str, Any]
    problems: list[str]

    def lines(self, name: str) -> list[str]:
        """Lines for people: PASS or FAIL with the figures, and the problems."""
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
    """All findings on one machine."""

    hardware: Hardware
    dry_run: bool
    """On the CPU, over gloo, with a tiny model: proves nothing about a GPU."""
    stages: dict[str, StageResult]

    def with_stage(self, name: str, result: StageResult) -> 'Report':
        return Report(self.hardware, self.dry_run, {**self.stages, name: result})

    def passed(self, name: str) -> bool:
        return name in self.stages and self.stages[name].passed


def load(output: Path, hardware: Hardware, dry_run: bool) -> Report:
    """Load the report of earlier calls from a folder, or an empty one.

    Raises:
        LabError: the file is damaged, or belongs to another machine.
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
    write_json(output / NAME, report)
