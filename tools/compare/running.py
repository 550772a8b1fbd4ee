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

from ..lab import models, presets, trainer
from ..lab.job import Job, Kind, Trained, memory_directory, train
from ..lab.launch import Launch
from ..lab.programs import LabError
from ..lab.run_log import RunLog
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
_STARTED = re.compile(re.escape(trainer.STARTED) + r'([\d.]+)')
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


class Lived(NamedTuple):
    """A job of a comparison that has ended. Times are seconds since the epoch."""

    trained: Trained
    """Its log begins with the end of the warm-up."""
    faults: Sequence[float] = ()
    """Times of the injected faults."""
    started: Sequence[float] = ()
    """Times when the program began in each process of any rank."""
    checkpoint_bytes: int = 0
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
    fork: bool
    """A process that has imported the program forks workers."""
    copy_gb_per_s: float = 0.0
    network_gb_per_s: float = 0.0
    mtbf_s: float = 0.0
    """Mean seconds between the faults, at the pace of plain Megatron."""
    faults: Sequence[PlannedFault] = ()
    """The trace."""

    def training_flags(self, copies: bool) -> list[str]:
        """Flags of plain Megatron; the last value of a flag counts."""
        flags = presets.training_flags(self.data, self.iterations, models.native_precision())
        flags += ['--global-batch-size', str(_BATCH)]
        flags += ['--eval-interval', str(self.evaluate), '--eval-iters', '1']
        if copies:
            flags = [flag for flag in flags if flag != _ZERO]
            flags += ['--expert-model-parallel-size', '1']
        return flags

    def plain(self, number: int, copies: bool) -> Lived:
        folder = self.output / f'{number}-{PLAIN}{"-copies" * copies}'
        launch = self._launch(folder, self.training_flags(copies))
        return Lived(_since_warm_up(train(launch), self.warm_up))

    def hurt(self, number: int, name: str, row: Row) -> Lived:
        """Run a row under all faults of the trace.

        Raises LabError: the run failed, or ended before the last fault.
        """
        folder = self.output / f'{number}-{name}'
        checkpoints = folder / 'checkpoints'
        injected: list[float] = []

        def inject(job: Job) -> float:
            begin = self._warm(job)
            injected.extend(_inject(job, row, fault, begin + fault.at_s) for fault in self.faults)
            return injected[-1]

        with (
            memory_directory('moevement-compare-') as memory,
            TemporaryDirectory(prefix='disk-', dir=self.output) as disk,
        ):
            limits = {'mtbf_s': self.mtbf_s, 'network_gb_per_s': self.network_gb_per_s}
            filled_in = {'window': self.window, 'disk': disk, **limits}
            own = row.training_flags(folder, memory, self.interval, **filled_in)
            flags = [*self.training_flags(row.copies), *own]
            limit = {trainer.COPY_GB_PER_S: f'{self.copy_gb_per_s:g}'}
            launch = self._launch(folder, flags, row.spares, limit if row.throttled else {})
            launch = launch._replace(settings=row.settings)
            try:
                trained = train(launch, inject, memory=memory / RUN_ID)
                saved = newest_bytes(checkpoints)
            finally:
                shutil.rmtree(checkpoints, ignore_errors=True)
        return Lived(_since_warm_up(trained, self.warm_up), injected, starts(folder), saved)

    def _warm(self, job: Job) -> float:
        """Wait for the end of the warm-up; returns its time, in seconds since the epoch."""
        for log in job.follow(f'iteration {self.warm_up}'):
            if rest := since(log, self.warm_up).iterations:
                return rest[0].time
        raise LabError('the job ended before its warm-up did', job.tail())

    def _launch(
        self,
        folder: Path,
        flags: Sequence[str],
        spares: int = 0,
        limit: dict[str, str] | None = None,
    ) -> Launch:
        variables = {**(limit or {}), **({trainer.FORK: '1'} if self.fork else {})}
        return Launch(
            folder,
            flags,
            nodes=RANKS,
            workers_per_node=1,
            max_restarts=_MAX_RESTARTS,
            spares=max(spares, int(self.fork)),
            variables=variables,
            program_file=trainer.__file__,
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


def _since_warm_up(trained: Trained, warm_up: int) -> Trained:
    return trained._replace(log=since(trained.log, warm_up))


def _inject(job: Job, row: Row, fault: PlannedFault, due: float) -> float:
    """Inject a fault once it is due; returns its time. Raises LabError: the job ended first."""
    while time.time() < due or not job.pids()[fault.rank]:
        if not job.running():
            raise LabError(
                f'{row.title}: the job ended before the fault at {fault.at_s:g} s; take more '
                '--iterations'
            )
        time.sleep(_POLL_S)
    if not row.restarts_all:
        return job.hurt(fault.kind, [fault.rank])
    lost: Sequence[int] = ()
    if fault.kind is Kind.NODE and row.keeps is Keeps.MEMORY:
        # All stop first: a worker that survived its peers would end, and restart, by itself.
        job.send(_EVERYTHING, signal.SIGSTOP)
        job.lose_node(fault.rank)
        lost = job.ranks_beside(fault.rank)
    return job.send([rank for rank in _EVERYTHING if rank not in lost], signal.SIGKILL)


def starts(folder: Path) -> list[float]:
    """Times at which the program began, in the logs of all ranks."""
    texts = (path.read_text('utf-8', errors='replace') for path in folder.glob('logs/*.log'))
    return sorted(float(found) for text in texts for found in _STARTED.findall(text))


def newest_bytes(checkpoints: Path) -> int:
    """Bytes of the newest checkpoint of Megatron; 0 without one."""
    newest = sorted(checkpoints.glob('iter_*'))[-1:]
    files = (path for folder in newest for path in folder.rglob('*') if path.is_file())
    return sum(path.stat().st_size for path in files)
