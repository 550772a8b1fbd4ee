# SPDX-License-Identifier: Apache-2.0
"""Jobs that train the same model in several ways, and the comparison of their final states."""

import signal
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moevement_ext.events import Event, ProtectionReduced
from tools.gpu_check.settings import Settings
from tools.lab import evidence
from tools.lab.digests import StateDigest, kinds_of_difference, read_digest
from tools.lab.errors import LabError
from tools.lab.job import Job, memory_directory
from tools.lab.launch import PROGRAM, Launch
from tools.lab.models import sparse_flags
from tools.lab.run_log import RunLog

_MAX_RESTARTS = 3
_WARM_UP = 3
"""Iterations that are not timed."""


class Kill(NamedTuple):
    """A worker that is lost on the way."""

    rank: int
    after: int
    """Iteration."""


class Trained(NamedTuple):
    """A job that came to its end."""

    log: RunLog
    state: StateDigest
    events: list[Event]
    recovery: evidence.Recovery | None
    """From the kill, if there was one."""

    @property
    def iteration_ms(self) -> float:
        """Median, of the last life."""
        times = [iteration.elapsed_ms for iteration in self.log.lives[-1]]
        return statistics.median(times[_WARM_UP:] or times)

    @property
    def exposed_ms(self) -> float:
        """Median of what the log says that sparse checkpointing added to an iteration."""
        exposed = [captured.exposed_ms for captured in self.log.captured]
        return statistics.median(exposed[_WARM_UP:] or exposed)


class Trials(NamedTuple):
    """Jobs of one model.

    Raises:
        LabError: (all methods) a job failed.
    """

    settings: Settings
    folder: Path
    """For logs and states."""
    flags: Sequence[str]
    """Megatron's flags for the model and its training."""
    nodes: int
    """Emulated, of one rank each."""
    window: int | str
    """W, or `auto`."""
    program_file: str = PROGRAM
    """Path of the program that trains."""
    variables: Mapping[str, str] = {}
    """Environment of the jobs besides their own."""

    def plain(self, name: str) -> Trained:
        """Upstream's trainer alone."""
        return self._train(name, [], None)

    def protected(self, name: str, kill: Kill | None = None) -> Trained:
        """With windows; one worker is killed and replaced, if so asked."""
        with memory_directory('moevement-check-', self.settings.memory) as memory:
            events = self.folder / name / 'events'
            return self._train(name, sparse_flags(memory, name, self.window, events), kill)

    def _train(self, name: str, protection: list[str], kill: Kill | None) -> Trained:
        print(f'-- {name}', flush=True)
        folder = self.folder / name
        digest = folder / 'digest.json'
        launch = Launch(
            folder,
            [*self.flags, *protection, '--sparse-ckpt-digest', str(digest)],
            self.nodes,
            1,
            max_restarts=_MAX_RESTARTS if kill else 0,
            fork=not self.settings.gpu,
            share_gpu=self.settings.gpu,
            program_file=self.program_file,
            variables=self.variables,
        )
        with Job(launch) as job:
            killed_at = None if kill is None else _kill(job, kill)
            log, events = job.finish(), job.events()
            recovery = None
            if killed_at is not None:
                recovery = evidence.recovery(events, job.pids(), killed_at, log.iterations)
        return Trained(log, read_digest(digest), events, recovery)


def _kill(job: Job, kill: Kill) -> float:
    """SIGKILL a worker once the job is far enough; returns when (seconds since the epoch)."""
    for log in job.follow(f'iteration {kill.after}'):
        if log.iterations and log.iterations[-1].number >= kill.after:
            return job.send([kill.rank], signal.SIGKILL)
    raise LabError(f'the job ended before iteration {kill.after}', job.tail())


def compare(
    expected: Trained, other: Trained, what: str, from_what: str = 'plain Megatron'
) -> list[str]:
    """What is wrong with the final state of another job, if anything."""
    kinds = kinds_of_difference(expected.state, other.state)
    if not kinds:
        return []
    return [f'{what}: the final state differs from {from_what} in {", ".join(kinds)}']


def reduced(trained: Trained) -> list[str]:
    """Why a job was protected less than it was meant to be."""
    found = evidence.kind_of(trained.events, ProtectionReduced)
    return sorted({f'protection was reduced: {event.reason}' for event in found})


def costs(plain: Trained, windows: Trained) -> dict[str, Any]:
    """What windows cost in each iteration."""
    return {
        'plain_ms': plain.iteration_ms,
        'windows_ms': windows.iteration_ms,
        'windows_over_plain': windows.iteration_ms / plain.iteration_ms,
        'exposed_ms': windows.exposed_ms,
    }
