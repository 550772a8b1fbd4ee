# SPDX-License-Identifier: Apache-2.0
"""Measures how soon a job that lost a node trains again on a spare node.

    moevement bench spare-node --rounds 3 --json spare-node.json

The launcher for Slurm runs all agents on this machine, under three host names: two hosts train one
pipeline stage each, the third is spare. Each rank reserves about `--gib` of host memory, most of it
for its log. The first host loses its agent, its worker and its memory. Two variants take turns: the
spare node has reserved a rank's host memory in advance, as in production; or the new worker must
reserve it. Seconds count from the loss to the first new iteration.

Exit status: 0 done, 1 states differ from those of plain Megatron, 2 a run failed.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from moevement_ext.events import Event, Protected, WorkerStarted
from moevement_ext.launch.hosts import SlurmStarter
from moevement_ext.launch.launch_config import LaunchConfig, StagedAction, StagedFault
from moevement_ext.launch.launcher_events import line_of
from moevement_ext.launch.link import ADDRESS_VARIABLE, Address
from moevement_ext.launch.node import AGENT, Step
from moevement_ext.launch.supervisor import Supervisor
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import ReservedPages

from ..lab.arguments import Parser, above_0, at_least
from ..lab.benchmark import add_output_flags, exit_on_sigterm, prepare, run_benchmark
from ..lab.digests import StateDigest, kinds_of_difference, read_digest
from ..lab.errors import LabError
from ..lab.evidence import kind_of
from ..lab.following import read_events
from ..lab.hardware import Hardware
from ..lab.job import DIGEST, memory_directory, train
from ..lab.launch import Launch
from ..lab.models import sparse_flags
from ..lab.run_log import parse_log
from ..lab.tables import say
from . import model
from .frame import Report, over_rounds, print_ways, take_turns

_HOSTS = ('a', 'b', 'c')
_STAGES = 2
_VICTIM = 0
_KILL_AFTER, _ITERATIONS = 8, 11
IN_ADVANCE, LATER = 'reserved in advance', 'reserved after the loss'
WAYS = {IN_ADVANCE: IN_ADVANCE, LATER: LATER}


class Loss(msgspec.Struct, frozen=True):
    """One job that lost a node."""

    seconds: float
    """From the loss to the first new iteration."""
    set_up_s: float
    """Seconds until the new worker has its model and its host memory."""
    kept: int
    in_advance: int
    """Bytes reserved on the spare node when the other node was lost."""
    different: list[str]
    """Kinds of state that differ from plain Megatron at the end."""


FIGURES: dict[str, Callable[[Loss, Loss], float]] = {
    'seconds': lambda one, first: one.seconds,
    'set_up_s': lambda one, first: one.set_up_s,
    'kept_gib': lambda one, first: one.kept / 2**30,
    'in_advance_gib': lambda one, first: one.in_advance / 2**30,
}
_COLUMNS = {
    'seconds': ('s to a new iteration', 2),
    'set_up_s': ('of them set-up', 2),
    'kept_gib': ('GiB a rank', 2),
    'in_advance_gib': ('GiB in advance', 2),
}


class _Starter(SlurmStarter):
    """Records the loss of a node, and the memory that the spare node has reserved by then.

    Args:
        reserves: the spare node reserves host memory.
        of_job: configuration, loop and report of `SlurmStarter`.
    """

    def __init__(self, reserves: bool, *of_job: Any) -> None:
        super().__init__(_HOSTS, _begin_agent, *of_job)
        self._reserves = reserves
        self.kept = self.in_advance = 0
        self.lost_at: float | None = None

    def reserve(self, memory: Path, files: Sequence[Sequence[int]]) -> None:
        self.kept = max(map(sum, files))
        if self._reserves:
            super().reserve(memory, files)

    def lose_node(self, node: int, memory: Callable[[str], NodeStore]) -> Path | None:
        self.in_advance = ReservedPages(memory(_HOSTS[-1])).nbytes()
        self.lost_at = time.time()
        return super().lose_node(node, memory)


def _begin_agent(host: str, address: Address) -> Step:
    environment = {**os.environ, ADDRESS_VARIABLE: str(address), 'SLURMD_NODENAME': host}
    return Step([sys.executable, *AGENT], environment)


def lose_a_node(folder: Path, launch: Launch, way: str, reference: StateDigest) -> Loss:
    events = folder / 'events'
    flags = [*launch.program()[1:], '--sparse-ckpt-events', str(events)]
    config = LaunchConfig(
        launch.program()[0],
        (*flags, '--sparse-ckpt-digest', str(folder / DIGEST)),
        nodes=_STAGES,
        log_dir=folder / 'logs',
        faults=(StagedFault(StagedAction.KILL_NODE, _VICTIM, _KILL_AFTER),),
    )
    starters: list[_Starter] = []

    def starter(*of_job: object) -> _Starter:
        starters.append(_Starter(way == IN_ADVANCE, *of_job))
        return starters[0]

    with _environment(launch), (folder / 'launcher.jsonl').open('wb') as said:

        def note(event: Event) -> None:
            said.write(line_of(event))

        code = Supervisor(config, note, starter).run()
    if code or starters[0].lost_at is None:
        raise LabError(f'{way}: the job ended with exit status {code}; see {folder}')
    lost_at = starters[0].lost_at
    log = parse_log((folder / 'logs' / f'rank{_STAGES - 1}.log').read_text('utf-8'))
    new = log.first_after(log.newest_until(lost_at))
    after = [one for one in read_events(events) if one.rank == _VICTIM and one.time > lost_at]
    began = next(iter(kind_of(after, WorkerStarted))).time
    ready = next(iter(kind_of(after, Protected))).time
    different = kinds_of_difference(reference, read_digest(folder / DIGEST))
    kept, in_advance = starters[0].kept, starters[0].in_advance
    return Loss(new.time - lost_at, ready - began, kept, in_advance, different)


@contextmanager
def _environment(launch: Launch) -> Iterator[None]:
    """Set the environment of the job's workers in this process, within the context."""
    former = dict(os.environ)
    os.environ.update(launch.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(former)


def _flags(data: Path) -> list[str]:
    layout = ['--pipeline-model-parallel-size', str(_STAGES), '--expert-model-parallel-size', '1']
    return model.training_flags(data, 2, _ITERATIONS) + layout


def _log_of(gib: float) -> list[str]:
    """Flags that enlarge the log by `gib` GiB, given in iterations of sent tensors."""
    sent_bytes = 2**20  # 4 micro-batches [128, 4, 256] of 16 bits
    return ['--sparse-ckpt-log-lag', str(round(gib * 2**30 / sent_bytes))]


def measure(args: argparse.Namespace, console: Console) -> Report:
    hardware = Hardware.here(gpu=False)
    output, data = prepare(args, 'spare-node')
    plain = _flags(data)
    reference = train(Launch(output / 'plain', plain, _STAGES, 1)).state

    def run(way: str, number: int) -> Loss:
        folder = output / f'{number}-{way.replace(" ", "-")}'
        folder.mkdir()
        with memory_directory() as memory:
            flags = [*plain, *sparse_flags(memory, model.RUN_ID, 1), *_log_of(args.gib)]
            return lose_a_node(folder, Launch(folder, flags, _STAGES, 1), way, reference)

    return summarize(hardware, take_turns(args.rounds, WAYS, run, lambda one: one.seconds, console))


def summarize(hardware: Hardware, rounds: list[dict[str, Loss]]) -> Report:
    different = sorted({kind for one in rounds for loss in one.values() for kind in loss.different})
    return Report(hardware, {}, over_rounds(rounds, WAYS, FIGURES), different, rounds)


def show(report: Report, console: Console) -> None:
    say(console, report.hardware.line())
    print_ways(report.ways.values(), _COLUMNS, console)
    say(console, f'Final states: {", ".join(report.different) or "equal"}.')


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement bench spare-node', description=__doc__)
    add = parser.add_argument
    add('--rounds', type=at_least(1), default=3, help='rounds over both variants (default: 3)')
    add('--gib', type=above_0, default=0.8, help='GiB of the log of a rank (default: 0.8)')
    add_output_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    exit_on_sigterm()
    return run_benchmark('bench_spare_node', parse_arguments(argv), measure, show)


if __name__ == '__main__':
    sys.exit(main())
