# SPDX-License-Identifier: Apache-2.0
"""Measures how soon a job of two workers trains, and what its start takes.

    moevement bench start --rounds 5 --json start.json

Plain Megatron under torchrun, and the same with protection under `moevement torchrun` and under
`moevement launch`, whose hot spare forks the workers, take turns. Seconds, CPU seconds and
anonymous memory are those of all processes of the job, its launcher and hot spare included, from
the command to the first logged iteration. The last line has the ratios of the last way to plain.

Exit status: 0 done, 2 a run failed.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
from rich.console import Console

from ..lab.arguments import Parser, at_least
from ..lab.benchmark import add_output_flags, exit_on_sigterm, prepare, run_benchmark
from ..lab.cpu_clock import memory_bytes, spent
from ..lab.errors import LabError
from ..lab.hardware import Hardware
from ..lab.job import memory_directory
from ..lab.launch import Launch, family, kill_groups
from ..lab.models import sparse_flags
from ..lab.tables import say
from . import model
from .frame import Report, over_rounds, print_ways, take_turns

_WORKERS = 2
_ITERATIONS = 1000  # the job is killed after the first iteration
_FIRST = re.compile(r'\biteration +1/')
_POLL_S = 0.05
PLAIN, TORCHRUN, SPARE = 'plain', 'torchrun', 'launch'
WAYS = {
    PLAIN: 'plain, torchrun',
    TORCHRUN: 'protected, moevement torchrun',
    SPARE: 'protected, moevement launch',
}
_LAUNCHERS = {
    PLAIN: ('torch.distributed.run', '--standalone', '--nproc-per-node', str(_WORKERS)),
    TORCHRUN: ('moevement_ext.launch.torchrun', '--standalone', '--nproc-per-node', str(_WORKERS)),
    SPARE: ('moevement_ext.launch.command_line', '--nodes', str(_WORKERS), '--'),
}


class Start(msgspec.Struct, frozen=True):
    """One start of a job, from the command to the first iteration."""

    seconds: float
    cpu_s: float
    memory: int


FIGURES: dict[str, Callable[[Start, Start], float]] = {
    'seconds': lambda one, first: one.seconds,
    'cpu_s': lambda one, first: one.cpu_s,
    'memory_mb': lambda one, first: one.memory / 1e6,
    'seconds_ratio': lambda one, first: one.seconds / first.seconds,
    'cpu_ratio': lambda one, first: one.cpu_s / first.cpu_s,
    'memory_ratio': lambda one, first: one.memory / first.memory,
}
_COLUMNS = {
    'seconds': ('s', 1),
    'cpu_s': ('CPU s', 1),
    'memory_mb': ('MB', 0),
    'seconds_ratio': ('s / plain', 2),
    'cpu_ratio': ('CPU / plain', 2),
    'memory_ratio': ('MB / plain', 2),
}


def start(way: str, launch: Launch) -> Start:
    """Start a job, and kill it after its first iteration; raises `LabError` if there is none."""
    launch.folder.mkdir()
    output, began = launch.folder / 'output.log', time.monotonic()
    with output.open('wb') as log:
        launcher = psutil.Popen(
            [sys.executable, '-m', *_LAUNCHERS[way], *launch.program()],
            env=launch.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not _FIRST.search(text := output.read_text(errors='replace')):
            if launcher.poll() is not None:
                raise LabError(f'{way}: the job ended before iteration 1; see {output}', text)
            time.sleep(_POLL_S)
        job = [launcher.pid]
        return Start(time.monotonic() - began, spent(job).total_s, memory_bytes(job))
    finally:
        processes = family([launcher])
        kill_groups([process.pid for process in processes])
        psutil.wait_procs(processes)


def measure(args: argparse.Namespace, console: Console) -> Report:
    hardware = Hardware.here(gpu=False)
    output, data = prepare(args, 'start')

    def run(way: str, number: int) -> Start:
        with memory_directory() as memory:
            return start(way, _launch(output / f'{number}-{way}', data, memory, way != PLAIN))

    rounds = take_turns(args.rounds, WAYS, run, lambda one: one.seconds, console)
    return Report(hardware, {}, over_rounds(rounds, WAYS, FIGURES), [], rounds)


def _launch(folder: Path, data: Path, memory: Path, protected: bool) -> Launch:
    stages = ['--pipeline-model-parallel-size', str(_WORKERS), '--expert-model-parallel-size', '1']
    own = sparse_flags(memory, model.RUN_ID, 1) if protected else []
    flags = [*model.training_flags(data, _WORKERS, _ITERATIONS), *stages, *own]
    return Launch(folder, flags, _WORKERS, 1)


def show(report: Report, console: Console) -> None:
    say(console, report.hardware.line())
    print_ways(report.ways.values(), _COLUMNS, console)
    found = report.ways[SPARE].figures
    ratios = (
        f'{name}={found[f"{name}_ratio"].median:.2f}' for name in ('seconds', 'cpu', 'memory')
    )
    say(console, f'start: {" ".join(ratios)}')


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='moevement bench start', description=__doc__)
    add = parser.add_argument
    add('--rounds', type=at_least(1), default=5, help='rounds over all ways (default: 5)')
    add_output_flags(parser)
    exit_on_sigterm()
    return run_benchmark('bench_start', parser.parse_args(argv), measure, show)


if __name__ == '__main__':
    sys.exit(main())
