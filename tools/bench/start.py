# SPDX-License-Identifier: Apache-2.0
"""Measures how soon a job trains, and what its start takes.

    moevement bench start --rounds 5 --json start.json

Plain Megatron under torchrun, and the same with protection under `moevement torchrun` and under
`moevement launch`, whose hot spare forks the workers, take turns. Seconds, CPU seconds and
anonymous memory are those of all processes of the job, its launcher and hot spare included, from
the command to the first logged iteration. The last line has the ratios of the last way to plain.

Exit status: 0 done, 2 a run failed.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import psutil

from ..lab import presets
from ..lab.cpu_clock import memory_bytes, spent
from ..lab.job import memory_directory
from ..lab.launch import Launch, family, kill_all
from ..lab.models import sparse_flags
from ..lab.programs import LabError
from .frame import Bench, Figure, Report

_ITERATIONS = 1000  # the job is killed after the first iteration
_FIRST = re.compile(r'\biteration +1/')
_POLL_S = 0.05
PLAIN, TORCHRUN, SPARE = 'plain', 'torchrun', 'launch'
_TORCHRUN = '--standalone --nproc-per-node'
# The module with its flags, up to the number of workers.
_LAUNCHERS = {
    PLAIN: f'torch.distributed.run {_TORCHRUN}',
    TORCHRUN: f'moevement_ext.launch.torchrun {_TORCHRUN}',
    SPARE: 'moevement_ext.launch.command_line --nodes',
}


class Start(msgspec.Struct, frozen=True):
    """One start of a job, from the command to the first iteration."""

    seconds: float
    cpu_s: float
    memory: int


def start(way: str, launch: Launch) -> Start:
    """Start a job, and kill it after its first iteration; raises `LabError` if there is none."""
    launch.folder.mkdir()
    command = [sys.executable, '-m', *_LAUNCHERS[way].split(), str(launch.nodes)]
    command += ['--'] if way == SPARE else []
    output, began = launch.folder / 'output.log', time.monotonic()
    with output.open('wb') as log:
        launcher = psutil.Popen(
            [*command, *launch.program()],
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
        kill_all(processes)
        psutil.wait_procs(processes)


class StartBench(Bench):
    """Starts of a job under several launchers."""

    PROG, ROUNDS = 'moevement bench start', 5
    TITLES = {
        PLAIN: 'plain, torchrun',
        TORCHRUN: 'protected, moevement torchrun',
        SPARE: 'protected, moevement launch',
    }
    FIGURES = {
        'seconds': Figure('s', '.1f'),
        'cpu_s': Figure('CPU s', '.1f'),
        'memory_mb': Figure('MB', '.0f', lambda one, plain: one.memory / 1e6),
        'seconds_ratio': Figure('s / plain', of=lambda one, plain: one.seconds / plain.seconds),
        'cpu_ratio': Figure('CPU / plain', of=lambda one, plain: one.cpu_s / plain.cpu_s),
        'memory_ratio': Figure('MB / plain', of=lambda one, plain: one.memory / plain.memory),
    }

    def run(self, way: str, number: int) -> Start:
        workers = self.args.workers
        with memory_directory() as memory:
            flags = presets.measured_flags(self.data, _ITERATIONS, stages=workers)
            own = sparse_flags(memory, presets.RUN_ID, 1) if way != PLAIN else []
            return start(way, Launch(self.output / f'{number}-{way}', [*flags, *own], workers, 1))

    def notes(self, report: Report) -> Iterator[str]:
        found = report.ways[SPARE].figures
        names = ('seconds', 'cpu', 'memory')
        ratios = (f'{name}={found[f"{name}_ratio"].median:.2f}' for name in names)
        yield f'start: {" ".join(ratios)}'


main = StartBench.main
