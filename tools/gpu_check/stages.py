# SPDX-License-Identifier: Apache-2.0
"""The stages in their order, and the program that runs one of them.

    python -m tools.gpu_check.stages NAME <output> <memory> gpu|cpu <file for the findings>

Each stage runs in its own process, so its changes to the CUDA context do not affect the next stage.
Findings are written at once, so they survive the end of the process.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console

from tools.gpu_check import copies, environment, four_rank, nccl, one_rank, own_tests
from tools.gpu_check.report import NOTHING, Findings, Settings
from tools.lab import precisions
from tools.lab.benchmark import exit_on_sigterm, print_failure
from tools.lab.errors import LabError
from tools.lab.figures import write_json

RECORDING = 'GPU, or torch lacks set_override_stale_capture_stream'
"""Needed to record a whole iteration, which torch 2.11 may refuse without that function."""


class Stage(NamedTuple):
    """One part of the check; it takes less than ten minutes."""

    run: Callable[[Settings], Iterator[Findings]]
    """Yields findings, part by part."""
    proves: str
    """The property that the stage proves."""
    needs: str = ''
    """`RECORDING`, or a module that the stage needs in addition to a GPU."""


STAGES = {
    'environment': Stage(environment.run, 'packages, versions and memory meet the requirements'),
    'copies': Stage(copies.run, 'captures are as fast as the machine and delay nothing else'),
    'tests': Stage(own_tests.run, 'tests/gpu passes, and the rules of Transformer Engine'),
    'nccl': Stage(nccl.run, 'survivors of a killed rank are unblocked and reconnected'),
    'one-rank': Stage(one_rank.run, 'a model of 0.3 G parameters recovers bit for bit'),
    'recorded': Stage(
        one_rank.run_recorded,
        'the same, with iterations recorded as a CUDA graph, recovers bit for bit',
        needs=RECORDING,
    ),
    'transformer-engine': Stage(
        one_rank.run_transformer_engine,
        'the same model on Transformer Engine, with grouped experts',
        needs='transformer_engine',
    ),
    **{
        f'precision-{name}': Stage(
            partial(one_rank.run_precision, name),
            f"{name.upper()} of the paper's Table 7 recovers bit for bit",
            needs='transformer_engine',
        )
        for name in precisions.FLAGS
        if name != 'bf16'
    },
    'four-rank': Stage(four_rank.run, 'a lost rank of PP 2 x EP 2 recovers alone, bit for bit'),
}


def possible(gpu: bool) -> list[str]:
    """Names of the stages that this machine can run."""
    return [
        name
        for name, stage in STAGES.items()
        if not stage.needs or (gpu and _is_there(stage.needs))
    ]


def _is_there(needed: str) -> bool:
    if needed == RECORDING:
        return hasattr(torch.autograd.graph, 'set_override_stale_capture_stream')
    return importlib.util.find_spec(needed) is not None


def run_stage(name: str, settings: Settings) -> Iterator[Findings]:
    """Run a stage in this process; an exception becomes a problem."""
    try:
        yield from STAGES[name].run(settings)
    except LabError as error:
        print_failure(Console(), name, error)
        yield Findings({}, [str(error)])


def main(argv: Sequence[str]) -> None:
    name, output, memory, device, target = argv
    found = NOTHING
    for part in run_stage(name, Settings(Path(output), Path(memory), device == 'gpu')):
        found = found.and_then(part)
        write_json(Path(target), found)
    write_json(Path(target), msgspec.structs.replace(found, done=True))


if __name__ == '__main__':
    exit_on_sigterm()
    main(sys.argv[1:])
