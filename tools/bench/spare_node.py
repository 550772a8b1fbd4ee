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
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from moevement_ext.events import Event, Protected, WorkerStarted
from moevement_ext.launch.hosts import SlurmStarter
from moevement_ext.launch.launch_config import LaunchConfig, StagedAction, StagedFault
from moevement_ext.launch.launcher_events import line_of
from moevement_ext.launch.link import ADDRESS_VARIABLE, Address
from moevement_ext.launch.node import AGENT, Step
from moevement_ext.launch.supervisor import Supervisor
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import ReservedPages, sizes_in

from ..lab import presets
from ..lab.digests import StateDigest, kinds_of_difference, read_digest
from ..lab.evidence import kind_of
from ..lab.following import read_events
from ..lab.job import DIGEST, memory_directory, train
from ..lab.launch import Launch
from ..lab.models import sparse_flags
from ..lab.programs import LabError
from ..lab.run_log import parse_log
from .frame import Bench, Figure, Report

_HOSTS = ('a', 'b', 'c')
_STAGES = 2
_VICTIM = 0
_KILL_AFTER, _ITERATIONS = 8, 11
_SENT_BYTES = 2**20  # in an iteration: 4 micro-batches [128, 4, 256] of 16 bits
IN_ADVANCE, LATER = 'reserved in advance', 'reserved after the loss'


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

    def reserve(self, memory: Path, files: Sequence[bytes]) -> None:
        self.kept = max(sum(sizes_in(of_rank)) for of_rank in files)
        if self._reserves:
            super().reserve(memory, files)

    def lose_node(
        self, node: int, memory: Callable[[str], NodeStore], for_good: bool = False
    ) -> Path | None:
        self.in_advance = ReservedPages(memory(_HOSTS[-1])).nbytes()
        self.lost_at = time.time()
        return super().lose_node(node, memory, for_good)


def _begin_agent(host: str, address: Address) -> Step:
    environment = {**os.environ, ADDRESS_VARIABLE: str(address), 'SLURMD_NODENAME': host}
    return Step([sys.executable, *AGENT], environment)


def lose_a_node(folder: Path, launch: Launch, way: str, reference: StateDigest) -> Loss:
    events = folder / 'events'
    program, *flags = launch.program()
    own = ('--sparse-ckpt-events', str(events), '--sparse-ckpt-digest', str(folder / DIGEST))
    config = LaunchConfig(
        program,
        (*flags, *own),
        nodes=_STAGES,
        log_dir=folder / 'logs',
        faults=(StagedFault(StagedAction.KILL_NODE, _VICTIM, _KILL_AFTER),),
    )
    starters: list[_Starter] = []

    def starter(*of_job: object) -> _Starter:
        starters.append(_Starter(way == IN_ADVANCE, *of_job))
        return starters[0]

    def note(event: Event) -> None:
        said.write(line_of(event))

    environment = mock.patch.dict(os.environ, launch.environment(), clear=True)
    with environment, (folder / 'launcher.jsonl').open('wb') as said:
        code = Supervisor(config, note, starter).run()
    lost = starters[0]
    if code or lost.lost_at is None:
        raise LabError(f'{way}: the job ended with exit status {code}; see {folder}')
    log = parse_log((folder / 'logs' / f'rank{_STAGES - 1}.log').read_text('utf-8'))
    new = log.resumed(lost.lost_at)
    after = [one for one in read_events(events) if one.rank == _VICTIM and one.time > lost.lost_at]
    began, ready = (kind_of(after, kind)[0].time for kind in (WorkerStarted, Protected))
    different = kinds_of_difference(reference, read_digest(folder / DIGEST))
    return Loss(new.time - lost.lost_at, ready - began, lost.kept, lost.in_advance, different)


class SpareNodeBench(Bench):
    """Losses of a node, with and without memory reserved on the spare one."""

    PROG = 'moevement bench spare-node'
    TITLES = {IN_ADVANCE: IN_ADVANCE, LATER: LATER}
    FIGURES = {
        'seconds': Figure('s to a new iteration'),
        'set_up_s': Figure('of them set-up'),
        'kept_gib': Figure('GiB a rank', of=lambda one, first: one.kept / 2**30),
        'in_advance_gib': Figure('GiB in advance', of=lambda one, first: one.in_advance / 2**30),
    }

    def __init__(self, args: argparse.Namespace, output: Path, data: Path) -> None:
        super().__init__(args, output, data)
        self._plain = presets.measured_flags(data, _ITERATIONS, stages=_STAGES)
        self._reference = train(Launch(output / 'plain', self._plain, _STAGES, 1)).state
        # The log has room for the tensors sent in so many iterations.
        self._log = ['--sparse-ckpt-log-lag', str(round(args.gib * 2**30 / _SENT_BYTES))]

    def run(self, way: str, number: int) -> Loss:
        folder = self.output / f'{number}-{way.replace(" ", "-")}'
        folder.mkdir()
        with memory_directory() as memory:
            flags = [*self._plain, *sparse_flags(memory, presets.RUN_ID, 1), *self._log]
            launch = Launch(folder, flags, _STAGES, 1)
            return lose_a_node(folder, launch, way, self._reference)

    def notes(self, report: Report) -> Iterator[str]:
        yield f'Final states: {", ".join(report.different) or "equal"}.'


main = SpareNodeBench.main
