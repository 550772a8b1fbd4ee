# SPDX-License-Identifier: Apache-2.0
"""Injects faults into one job after another, and compares each with plain Megatron."""

import argparse
import importlib.util
import shutil
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rich.console import Console

from ..lab.digests import StateDigest, compare, read_digest
from ..lab.job import DIGEST, Job, Kind, memory_directory, train
from ..lab.programs import LabError
from ..lab.tables import say
from .configuration import (
    BF16,
    LONGEST_WINDOW,
    RUN_ID,
    Configuration,
    draw_configuration,
    draw_without_spares,
    parse_layout,
)
from .drawing import draw_faults, draw_window
from .injecting import FEWEST_ITERATIONS, LAST_ITERATIONS, FaultInjector
from .results import FaultRecord, JobDone, Refused, Results

_ITERATIONS_PER_FAULT = 2 * FEWEST_ITERATIONS
_MOST_REFUSALS = 5
_MAX_RESTARTS = 1000
# Limit of jobs as a multiple of the jobs that the faults need: a job may fail, or end too soon.
_MORE_JOBS = 3


@dataclass(frozen=True)
class Campaign:
    """Runs jobs until all faults are injected.

    A campaign that draws configurations continues with the next job after a failed one.
    """

    output: Path
    data: Path
    args: argparse.Namespace
    results: Results
    console: Console

    @property
    def faults_per_job(self) -> int:
        return min(self.args.faults, self.args.faults_per_job)

    def run(self) -> None:
        most_jobs = _MORE_JOBS * -(-self.args.faults // self.faults_per_job) + _MORE_JOBS
        while len(self.results.jobs) < most_jobs and self._left() > 0:
            job = self._job(len(self.results.jobs) + 1)
            self.results.add(job)
            if job.failed and not self.args.configurations:
                raise LabError(f'job {job.number}: {job.failed}')

    def _left(self) -> int:
        return self.args.faults - len(self.results.faults)

    def _job(self, number: int) -> JobDone:
        drawn = (number - 1) % (self.args.configurations or 1)
        configuration, plain = self._reference(number, drawn)
        say(self.console, f'job {number}: {configuration}')
        kinds = [kind for kind in self.args.kinds if kind in configuration.kinds()] or [Kind.KILL]
        faults = draw_faults(
            self.args.seed,
            min(self._left(), self.faults_per_job),
            kinds,
            configuration.nodes,
            configuration.workers_per_node,
            job=number,
            most_away=configuration.replicas,
        )
        began, last = time.time(), self._iterations(configuration)
        done, lost, failed, identical = list[FaultRecord](), list[str](), '', False

        def report(record: FaultRecord, line: str) -> None:
            done.append(record)
            say(self.console, f'{time.time() - began:6.1f} s  {line}')

        def hurt(job: Job) -> None:
            try:
                FaultInjector(job, last, report).inject_all(faults)
            finally:
                lost.extend(map(str, job.unexpected))

        folder = self._anew(f'job{number}')
        if configuration.disk:
            self._anew(f'job{number}-disk').mkdir()
        with memory_directory() as memory:
            flags = configuration.training_flags(self.data, last, folder)
            flags += configuration.sparse_flags(memory, folder)
            launch = configuration.launch(folder, flags, _MAX_RESTARTS)
            try:
                found = train(launch, hurt, configuration.launcher, memory / RUN_ID)
                identical = self._compare(plain, found.state, number)
            except LabError as error:
                failed = str(error)
                say(self.console, f'job {number}: FAILED: {error}\n{error.tail}')
        for death in lost:
            say(self.console, f'job {number}: survivor lost: {death}')
        return JobDone(
            number=number,
            configuration=drawn,
            what=str(configuration),
            faults=done,
            identical=identical,
            survivors_lost=lost,
            failed=failed,
        )

    def _compare(self, reference: StateDigest, digest: StateDigest, number: int) -> bool:
        different = compare(self.console, reference, digest)
        say(self.console, f'job {number}: final state {"DIFFERENT" if different else "equal"}')
        return not different

    def _reference(self, number: int, drawn: int) -> tuple[Configuration, StateDigest]:
        """Draw a configuration that plain Megatron accepts; returns it and its final state."""
        while True:
            attempt = self.results.refusals(drawn)
            configuration = self.draw(number, drawn, attempt)
            try:
                return configuration, self._plain(drawn, attempt, configuration)
            except LabError as error:
                if attempt == _MOST_REFUSALS or not self.args.configurations:
                    raise
                refused = f'plain Megatron refuses, drawn again: {configuration}: {error}'
                say(self.console, refused)
                self.results.add(Refused(drawn, str(configuration), error.tail))

    def draw(self, job: int, number: int, attempt: int) -> Configuration:
        """Draw configuration `number` for a job; without --configurations, draw only its window."""
        args = self.args
        if args.without_spares:
            drawn = draw_without_spares(args.seed, number)
        elif args.configurations:
            engine = importlib.util.find_spec('transformer_engine') is not None
            narrow = args.stand_ins or (args.share_gpu and engine)
            drawn = draw_configuration(args.seed, number, attempt, narrow)
        else:
            window = draw_window(args.seed, job, LONGEST_WINDOW)
            drawn = Configuration(parse_layout('pp2-ep2'), BF16, ('dropout',), window, nodes=4)
        return drawn._replace(share_gpu=args.share_gpu, hang_timeout_s=args.hang_timeout)

    def _plain(self, number: int, attempt: int, configuration: Configuration) -> StateDigest:
        """Run plain Megatron to its end, once per configuration."""
        iterations = self._iterations(configuration)
        # The folder's name includes the flags: only states of equal flags are compared.
        trained = ' '.join(configuration.training_flags(self.data, iterations, Path()))
        folder = self.output / f'plain{number}-{attempt}-{sha256(trained.encode()).hexdigest()[:8]}'
        if not (folder / DIGEST).exists():
            self._anew(folder.name)
            flags = configuration.training_flags(self.data, iterations, folder)
            train(configuration.launch(folder, flags))
        return read_digest(folder / DIGEST)

    def _iterations(self, configuration: Configuration) -> int:
        """Iterations of each job: enough for all faults, and as many as the reference."""
        longest = configuration.longest_window if self.args.configurations else LONGEST_WINDOW
        return 2 * longest + self.faults_per_job * _ITERATIONS_PER_FAULT + LAST_ITERATIONS

    def _anew(self, name: str) -> Path:
        shutil.rmtree(self.output / name, ignore_errors=True)
        return self.output / name
