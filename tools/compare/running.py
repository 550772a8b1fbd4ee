# SPDX-License-Identifier: Apache-2.0
"""Runs a job of a comparison, and injects the same faults as in all other rows: the trace."""

import random
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from moevement_ext.config import UNFLAGGED

from ..lab import four_ranks, models
from ..lab.errors import LabError
from ..lab.job import Job, Kind, Trained, memory_directory, train
from ..lab.launch import Launch
from ..lab.run_log import RunLog
from . import program
from .rows import PLAIN, RUN_ID, Keeps, Row

STAGES, RANKS = 2, 4
STATE_BYTES = 1_533_000
"""Bytes of a capture of the whole state of a rank, as a job with windows of 1 logs them. In bf16
and in fp32 it is about the same."""
# Samples of an iteration: three micro-batches of two on each data-parallel rank.
_BATCH = 6 * RANKS // STAGES
_EVERYTHING = range(RANKS)
_MAX_RESTARTS = 1000
_POLL_S = 0.02
_STARTED = re.compile(re.escape(program.STARTED) + r'([\d.]+)')
_PROGRAM = program.__file__
_ZERO = '--use-distributed-optimizer'
_KINDS = (Kind.KILL, Kind.NODE)
# Smallest gap between two faults, as a share of the mean gap.
_LEAST_GAP = 0.5


class PlannedFault(NamedTuple):
    """A fault of the trace."""

    at_s: float
    """Seconds since the first iteration was logged."""
    kind: Kind
    rank: int
    """The killed rank; for a node, one of its ranks."""


class InjectedFault(NamedTuple):
    """A fault that was injected into a job."""

    at: float
    """Time in seconds since the epoch."""
    rank: int
    kind: Kind


class Lived(NamedTuple):
    """A job of a comparison that has ended."""

    trained: Trained
    """Its log begins with the end of the warm-up."""
    injected: list[InjectedFault]
    started: list[float]
    """Times when the program began in each process of any rank (seconds since the epoch)."""
    folder: Path
    checkpoint_bytes: int
    """Bytes of the newest checkpoint of Megatron, all ranks; 0: there is none."""


class Course(NamedTuple):
    """Common parameters of all jobs of a comparison."""

    data: Path
    output: Path
    iterations: int
    warm_up: int
    """Iterations before the trace and the measurement begin."""
    evaluate: int
    """Iterations between two evaluations."""
    interval: int
    """Iterations between two dense checkpoints."""
    window: str
    copy_gb_per_s: float
    network_gb_per_s: float
    mtbf_s: float
    """Mean seconds between the faults, at the pace of plain Megatron."""
    fork: bool
    """A process that has imported the program forks workers."""

    def training_flags(self, copies: bool) -> list[str]:
        """Flags of plain Megatron; the last value of a flag counts."""
        flags = four_ranks.training_flags(self.data, self.iterations, models.native_precision())
        flags += ['--global-batch-size', str(_BATCH)]
        flags += ['--eval-interval', str(self.evaluate), '--eval-iters', '1']
        if copies:
            flags = [flag for flag in flags if flag != _ZERO]
            flags += ['--expert-model-parallel-size', '1']
        return flags

    def plain(self, number: int, copies: bool) -> Lived:
        folder = self.output / f'{number}-{PLAIN}{"-copies" * copies}'
        launch = self._launch(folder, self.training_flags(copies))
        return self._lived(train(launch), [], folder, 0)

    def hurt(self, number: int, name: str, row: Row, faults: Sequence[PlannedFault]) -> Lived:
        """Run a row under all faults of the trace.

        Raises LabError: the run failed, or ended before the last fault.
        """
        folder = self.output / f'{number}-{name}'
        injected: list[InjectedFault] = []
        with (
            memory_directory('moevement-compare-') as memory,
            TemporaryDirectory(prefix='disk-', dir=self.output) as disk,
        ):
            own = row.training_flags(
                folder, memory, self.interval,
                window=self.window, mtbf_s=self.mtbf_s, network_gb_per_s=self.network_gb_per_s,
                disk=disk,
            )  # fmt: skip
            flags = [*self.training_flags(row.copies), *own]
            launch = self._launch(folder, flags, row.spares)
            if row.throttled:
                limit = {program.COPY_GB_PER_S: f'{self.copy_gb_per_s:g}'}
                limit[UNFLAGGED] = row.settings
                launch = launch._replace(variables={**launch.variables, **limit})

            def inject(job: Job) -> float:
                for fault, due in zip(faults, self._moments(job, faults), strict=True):
                    injected.append(_inject(job, row, fault, due))
                return injected[-1].at

            try:
                trained = train(launch, inject, memory=memory / RUN_ID)
            finally:
                checkpoints = folder / 'checkpoints'
                saved = _newest_bytes(checkpoints)
                shutil.rmtree(checkpoints, ignore_errors=True)
        return self._lived(trained, injected, folder, saved)

    def _lived(
        self, trained: Trained, injected: list[InjectedFault], folder: Path, checkpoint_bytes: int
    ) -> Lived:
        measured = trained._replace(log=since(trained.log, self.warm_up))
        return Lived(measured, injected, starts(folder), folder, checkpoint_bytes)

    def _moments(self, job: Job, faults: Sequence[PlannedFault]) -> list[float]:
        """Times of the faults, in seconds since the epoch, once the warm-up is over."""
        for log in job.follow(f'iteration {self.warm_up}'):
            if rest := since(log, self.warm_up).iterations:
                return [rest[0].time + fault.at_s for fault in faults]
        raise LabError('the job ended before its warm-up did', job.tail())

    def _launch(self, folder: Path, flags: Sequence[str], spares: int = 0) -> Launch:
        variables = {program.FORK: '1'} if self.fork else {}
        spares = max(spares, int(self.fork))
        return Launch(
            folder, flags, RANKS, 1, _MAX_RESTARTS, spares, variables, program_file=_PROGRAM
        )


def draw_faults(
    seed: int, count: int, begin_s: float, end_s: float, ranks: int
) -> list[PlannedFault]:
    """Draw the trace: random moments and victims; kills and node losses alternate."""
    drawn = random.Random(seed)
    gap = _LEAST_GAP * (end_s - begin_s) / count
    free = end_s - begin_s - gap * (count - 1)
    moments = sorted(drawn.uniform(0, free) for _ in range(count))
    return [
        PlannedFault(
            round(begin_s + moment + number * gap, 3),
            _KINDS[number % len(_KINDS)],
            drawn.randrange(ranks),
        )
        for number, moment in enumerate(moments)
    ]


def since(log: RunLog, number: int) -> RunLog:
    """Return the log from an iteration on; later run attempts are kept whole."""
    attempts = log.attempts
    for place, attempt in enumerate(attempts):
        rest = [item for item in attempt if item.number >= number]
        if rest:
            captured = dropwhile(lambda slot: slot.iteration < number, log.captured)
            return replace(log, attempts=[rest, *attempts[place + 1 :]], captured=list(captured))
    return replace(log, attempts=[], captured=[])


def _inject(job: Job, row: Row, fault: PlannedFault, due: float) -> InjectedFault:
    """Wait for the moment of a fault, and inject it. Raises LabError: the job ended first."""
    while time.time() < due or not job.pids()[fault.rank]:
        if not job.running():
            raise LabError(
                f'{row.title}: the job ended before the fault at {fault.at_s:g} s; take more '
                '--iterations'
            )
        time.sleep(_POLL_S)
    if not row.restarts_all:
        return InjectedFault(job.hurt(fault.kind, [fault.rank]).time, fault.rank, fault.kind)
    lost: Sequence[int] = ()
    if fault.kind is Kind.NODE and row.keeps is Keeps.MEMORY:
        # All stop first: a worker that survived its peers would end, and restart, by itself.
        job.send(_EVERYTHING, signal.SIGSTOP)
        job.lose_node(fault.rank)
        lost = job.ranks_of_node(fault.rank)
    rest = [rank for rank in _EVERYTHING if rank not in lost]
    return InjectedFault(job.send(rest, signal.SIGKILL), fault.rank, fault.kind)


def starts(folder: Path) -> list[float]:
    """Times at which the program began, in the logs of all ranks."""
    texts = (path.read_text('utf-8', errors='replace') for path in folder.glob('logs/*.log'))
    return sorted(float(found) for text in texts for found in _STARTED.findall(text))


def _newest_bytes(checkpoints: Path) -> int:
    folders = sorted(checkpoints.glob('iter_*'))
    if not folders:
        return 0
    return sum(path.stat().st_size for path in folders[-1].rglob('*') if path.is_file())
