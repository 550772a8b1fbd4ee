# SPDX-License-Identifier: Apache-2.0
"""Measures what a job without spare nodes loses in speed, and how soon its guests train.

    moevement bench guests --json guests.json

Four data-parallel ranks train on four emulated nodes, with all experts on each rank, and an
emulated device on each node: micro-batches take turns there. First a node loses its worker and its
memory, and a hot spare replaces the worker there. Later the node is lost for good, and its rank is
a guest of another. Two variants take turns: peers compute the guest's micro-batches, or the guest
does. Iterations with the guest are compared with those before any failure, and the seconds from
each SIGKILL to a new iteration with each other.

Exit status: 0 done, 1 states differ from those of plain Megatron, 2 a run failed.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from ..chaos.configuration import BF16, RUN_ID, Configuration, parse_layout
from ..lab import trainer
from ..lab.job import Job, Kind, Trained, memory_directory, train
from ..lab.run_log import RunLog
from .frame import Bench, Figure, Report

_VICTIM = 1
_WARM_UP, _KILL_AT, _LOSE_AT, _ITERATIONS = 3, 10, 18, 30
_SETTLED = 3  # iterations from a recovery on that do not count
_JOB = Configuration(parse_layout('dp4'), BF16, ('dropout',), window=2, nodes=4, guests=True)
_BATCH = ['--global-batch-size', '12']  # three micro-batches on each rank
ROUTES, GUESTS = 'routes', 'guests'
_SETTING = {ROUTES: 'routes = "auto"', GUESTS: 'routes = "off"'}


class Lived(msgspec.Struct, frozen=True):
    """One job whose node failed, and was lost later."""

    fault_free_s: float
    guest_s: float
    """Median iterations before the failures, and after them."""
    spare_seconds: float
    seconds: float
    """Seconds from SIGKILL to a new iteration: of a hot spare, and of a guest."""
    different: list[str]
    """Kinds of state that differ from plain Megatron at the end."""


def lived(log: RunLog, killed_at: Sequence[float], different: list[str]) -> Lived:
    """Evaluate a job; `killed_at`: times of both failures (seconds since the epoch)."""
    new = [log.resumed(at) for at in killed_at]
    spare_s, guest_s = (one.time - at for one, at in zip(new, killed_at, strict=True))
    fault_free = log.wall_seconds(_WARM_UP, log.newest_until(killed_at[0]))
    with_guest = log.wall_seconds(new[1].number + _SETTLED)
    fault_free_s, with_guest_s = map(statistics.median, (fault_free, with_guest))
    return Lived(fault_free_s, with_guest_s, spare_s, guest_s, different)


class GuestsBench(Bench):
    """Losses of a node without a spare one."""

    PROG = 'moevement bench guests'
    TITLES = {ROUTES: 'peers compute for the guest', GUESTS: 'the guest computes'}
    FIGURES = {
        'fault_free_s': Figure('s an iteration'),
        'guest_s': Figure('with a guest'),
        'iteration': Figure('ratio', of=lambda one, first: one.guest_s / one.fault_free_s),
        'spare_seconds': Figure('s to a new one, hot spare'),
        'seconds': Figure('guest'),
        'ratio': Figure('ratio', of=lambda one, first: one.seconds / one.spare_seconds),
    }

    def __init__(self, args: argparse.Namespace, output: Path, data: Path) -> None:
        super().__init__(args, output, data)
        self._plain = [*_JOB.training_flags(data, _ITERATIONS, output), *_BATCH]

    @cached_property
    def _reference(self) -> Trained:
        return train(_JOB.launch(self.output / 'plain', self._plain))

    def run(self, way: str, number: int) -> Lived:
        folder = self.output / f'{number}-{way}'
        with memory_directory() as memory:
            flags = [*self._plain, *_JOB.sparse_flags(memory, folder)]
            devices = {trainer.SECONDS: str(self.args.device), trainer.DEVICES: str(memory)}
            launch = _JOB.launch(folder, flags, max_restarts=9)
            launch = launch._replace(
                variables=devices, settings=_SETTING[way], program_file=trainer.__file__
            )
            killed_at: list[float] = []

            def hurt(job: Job) -> None:
                for kind, at in ((Kind.NODE, _KILL_AT), (Kind.AWAY, _LOSE_AT)):
                    job.await_iteration(at)
                    killed_at.append(job.hurt(kind, [_VICTIM]))

            done = train(launch, hurt, memory=memory / RUN_ID)
        return lived(done.log, killed_at, done.different(self._reference))

    def notes(self, report: Report) -> Iterator[str]:
        routes, guests = (report.ways[way].figures for way in (ROUTES, GUESTS))
        yield (
            f'{_JOB.nodes} nodes of one rank, one is lost; micro-batches of {self.args.device} s; '
            f'states: {", ".join(report.different) or "equal"}.'
        )
        iteration, alone = routes['iteration'].median, guests['iteration'].median
        yield f'routes: iteration={iteration:.2f} guests={alone:.2f}'
        yield f'guests: seconds={routes["ratio"].median:.2f}'


main = GuestsBench.main
