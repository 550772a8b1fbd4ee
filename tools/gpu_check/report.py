# SPDX-License-Identifier: Apache-2.0
"""Settings of all stages, and their findings so far: one file, kept between calls."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch
import xxhash

from tools.lab.errors import LabError
from tools.lab.figures import write_json
from tools.lab.hardware import Hardware, installed
from tools.lab.launch import PROGRAM, ROOT

NAME = 'gpu-check.json'
# Code that jobs and stages run.
_CODE = (
    *('moevement_ext', 'megatron/moevement', 'tools'),
    *('tests/gpu', 'tests/stand_ins', 'tests/transformer_engine'),
)


class Settings(NamedTuple):
    """Output folders and device of a check."""

    output: Path
    """Folder of the results and all other output."""
    memory: Path
    """Directory in a tmpfs for windows."""
    gpu: bool
    """False: a dry run on the CPU, over gloo, with tiny models."""

    @property
    def backend(self) -> str:
        return 'nccl' if self.gpu else 'gloo'

    def folder(self, stage: str) -> Path:
        """Empty folder for logs and states of a stage; removes those of an earlier run."""
        folder = self.output / stage
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


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
    gpu_id: str = ''
    """A digest that distinguishes GPUs of one model."""
    software: str = ''
    """Digest of the code and of the libraries under it."""

    @classmethod
    def here(cls, gpu: bool) -> Self:
        """A report without stages, of this machine and this code."""
        uuid = torch.cuda.get_device_properties(0).uuid if gpu else ''
        identity = xxhash.xxh3_64_hexdigest(str(uuid).encode())
        return cls(Hardware.here(gpu), not gpu, {}, identity, _software(gpu))

    def with_stage(self, name: str, result: StageResult) -> Self:
        return msgspec.structs.replace(self, stages={**self.stages, name: result})

    def passed(self, name: str) -> bool:
        return name in self.stages and self.stages[name].passed


def _software(gpu: bool) -> str:
    nccl = torch.cuda.nccl.version() if gpu else None
    libraries = (nccl, installed('megatron-core'), installed('transformer-engine'))
    digest = xxhash.xxh3_64(repr(libraries).encode())
    below = sorted(file for name in _CODE for file in (ROOT / name).rglob('*.py'))
    for file in (ROOT / PROGRAM, *below):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def load(output: Path, now: Report) -> Report:
    """Load the report of earlier calls from a folder; `now` if there is none of this software.

    Raises:
        LabError: the file is damaged, or belongs to another machine or GPU.
    """
    path = output / NAME
    if not path.exists():
        return now
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.MsgspecError as error:
        raise LabError(f'{path} is damaged ({error}); remove it or give another --output') from None
    ours, theirs = (
        (one.hardware.gpu, one.hardware.processor, one.hardware.torch, one.dry_run, one.gpu_id)
        for one in (now, report)
    )
    if ours != theirs:
        raise LabError(
            f'{path} has results of {"a dry run on " if report.dry_run else ""}'
            f'{report.hardware.line()}, not of this GPU; give another --output'
        )
    if report.software != now.software:
        print(f'{path} has results of other code or libraries: all stages run again', flush=True)
        return now
    return report


def save(output: Path, report: Report) -> None:
    write_json(output / NAME, report)
